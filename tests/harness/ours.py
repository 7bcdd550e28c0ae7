"""What the tests ask of this package: a compiled model, what was planned for it, and what really ran."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.profiler import ProfilerActivity, profile

from compiled_fsdp.reporting.report import GraphReport

if torch.__version__ < "2.12":  # or a unit inside of a checkpoint breaks the graph, see docs/troubleshooting.md
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def compiled(model: nn.Module, *, codegen: str = "aot_eager", fullgraph: bool = False, **options: Any) -> nn.Module:
    """`model` compiled by our backend. "aot_eager" is quick to compile and exact."""
    return torch.compile(model, backend="compiled_fsdp", fullgraph=fullgraph, options={"codegen": codegen, **options})


RUN = {"eager": lambda model: model, "aot_eager": compiled}
"""How a test that is parametrized by it runs a model."""


def planned_ops(graph: GraphReport) -> Counter[str]:
    """How often each op of ours and each functional collective stands in the planned graph, before it is lowered."""
    return Counter(re.findall(r"torch\.ops\.(?:compiled_fsdp|_c10d_functional)\.(\w+)\.", graph.planned))


def collectives_of(run: Callable[[], Any], prefix: str = "gloo:") -> list[str]:
    """What gloo did on this rank while `run()` ran: "all_gather [[992]]" and the like, in the order in which it started. Its two
    threads may start two of them in either order; "_c10d_functional::" gives launches and waits, which have one order.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run()
    events = [event for event in profiled.events() if event.name.startswith(prefix)]
    events.sort(key=lambda event: event.time_range.start)
    return [f"{event.name.removeprefix(prefix)} {event.input_shapes}" for event in events]
