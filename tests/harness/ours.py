"""What the tests ask of this package: a compiled model, what was planned for it, and what really ran."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from compiled_fsdp import fully_shard
from compiled_fsdp.reporting.report import GraphReport


def compiled(model: nn.Module, *, codegen: str = "aot_eager", fullgraph: bool = False, **options: Any) -> nn.Module:
    """`model` compiled by our backend. "aot_eager" is quick to compile and exact."""
    return torch.compile(model, backend="compiled_fsdp", fullgraph=fullgraph, options={"codegen": codegen, **options})


WAYS = {"eager": lambda model: model, "compiled_fsdp": compiled}
"""How a test that is parametrized by it runs a model."""

ways = pytest.mark.parametrize("way", WAYS)

by_unit = partial(compiled, bucket="module")  # a unit has one collective, so they can be counted
COUNTED = {**WAYS, "by unit": by_unit}


def planned_ops(graph: GraphReport) -> Counter[str]:
    """How often each op of ours and each functional collective stands in the planned graph, before it is lowered.

    Launches are counted by what is launched: "gather", "reduce", and "all_reduce" over replicas.
    """
    ops = Counter(re.findall(r"torch\.ops\.(?:compiled_fsdp|_c10d_functional)\.(\w+)\.", graph.planned))
    launches = re.findall(r"launch\.default\(.*'(\w+) \w+ (\w+); world", graph.planned)
    assert ops.pop("launch", 0) == len(launches)
    return ops + Counter(transport if transport == "all_reduce" else kind for kind, transport in launches)


def collectives_of(run: Callable[[], Any], prefix: str = "gloo:") -> list[str]:
    """What gloo did on this rank while `run()` ran: "all_gather [[992]]" and the like, in the order in which it
    started. Its two threads may start two of them in either order; "_c10d_functional::" gives launches and waits, which
    have one order.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run()
    events = [event for event in profiled.events() if event.name.startswith(prefix)]
    events.sort(key=lambda event: event.time_range.start)
    return [f"{event.name.removeprefix(prefix)} {event.input_shapes}" for event in events]


def counted(run) -> Counter[str]:
    """Launches of collectives on the wire's level, by kind; a reduce-scatter may be an all-to-all."""
    names = {
        "all_gather_into_tensor": "AG",
        "all_gather_into_tensor_out": "AG",
        "reduce_scatter_tensor": "RS",
        "all_to_all_single": "RS",
        "all_reduce": "AR",
    }
    found = (name.split()[0] for name in collectives_of(run, "_c10d_functional::"))
    return Counter(names[name] for name in found if name in names)


def new_group() -> DeviceMesh:
    """All ranks, which have agreed on nothing: a rank with a model that is known asks nobody, and waits in a gather."""
    return DeviceMesh.from_group(dist.new_group(), "cpu")


def two_layers(rows: int = 4, layers: int = 2, **options: Any) -> nn.Module:
    """Linear layers in one unit, the first of 4 rows and the others of `rows`."""
    return fully_shard(nn.Sequential(nn.Linear(4, 4), *(nn.Linear(4, rows) for _ in range(layers - 1))), **options)
