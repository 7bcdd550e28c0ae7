"""What is stored in a parameter's place while it reads in full is not there to stay.

``torch.func.functional_call`` puts back what it has found: in a forward the full parameter.
"""

from __future__ import annotations

from typing import Any

from compiled_fsdp.compat.dynamo import skip_as_frame
from compiled_fsdp.state.unit import Unit


@skip_as_frame
def note_replaced(unit: Unit, reads: Any, name: str) -> None:
    """Something else is stored for a parameter of an open unit (in a module's ``ParameterReads``)."""
    unit.replaced = [*(unit.replaced or ()), (reads, name)]


@skip_as_frame
def put_back(unit: Unit) -> None:
    """The unit is closed: where something else was stored meanwhile, the DTensors are again."""
    if unit.replaced is None:
        return
    for reads, name in unit.replaced:
        if name in reads:
            reads[name] = reads.known[name].param
    unit.replaced = None
