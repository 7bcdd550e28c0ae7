"""Warnings about compiles that work, but hardly as the user meant them."""

from __future__ import annotations

import logging

from compiled_fsdp.base.logs import warn_once
from compiled_fsdp.compat.dynamo import int_attribute_recompiled_for
from compiled_fsdp.state.registry import any_unit_lives

log = logging.getLogger(__name__)


def warn_of_int_attributes() -> None:
    """Warn if Dynamo compiles a layer anew because of an integer attribute."""
    attribute = int_attribute_recompiled_for()
    if attribute is not None:
        warn_once(
            log,
            ("integer attribute", attribute),
            "layers that are equal but for the integer %s are compiled once for each of its values, since Dynamo takes "
            "integer attributes of modules for constants. To share one compiled graph, set "
            "torch._dynamo.config.allow_unspec_int_on_nn_module = True before the first call, or keep the number in a "
            "tensor.",
            attribute,
        )


def warn_if_unsharded() -> None:
    """Warn if nothing is sharded in this process."""
    if not any_unit_lives():
        warn_once(
            log,
            "unsharded",
            'a model without sharded parameters was compiled with backend="compiled_fsdp": call '
            "compiled_fsdp.fully_shard(model) before torch.compile. It runs as with "
            'backend="inductor".',
        )
