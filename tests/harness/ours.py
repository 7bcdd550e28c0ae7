"""Helpers around compiled_fsdp: compile a model, count the ops of its plan, and record the collectives that ran."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
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
from tests.harness.cases import variants


def compiled(model: nn.Module, *, codegen: str = "aot_eager", fullgraph: bool = False, **options: Any) -> nn.Module:
    """Compile `model` by compiled_fsdp's backend. "aot_eager" compiles quickly and is exact."""
    return torch.compile(model, backend="compiled_fsdp", fullgraph=fullgraph, options={"codegen": codegen, **options})


WAYS = {"eager": lambda model: model, "compiled_fsdp": compiled}
"""The ways in which a test that is parametrized by `ways` runs a model."""

ways = pytest.mark.parametrize("way", WAYS)


def ways_and(name: str, values: Iterable[Any], *, compiled: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by `way` and by `name`: each value runs in each way.

    `make test` runs every value uncompiled, but compiles only those in `compiled`. The other ones are `more`, because
    most of a test's time is the time of its compiles.
    """
    values = list(values)
    quick = [*itertools.product(["eager"], values), *itertools.product(["compiled_fsdp"], compiled)]
    return pytest.mark.parametrize(("way", name), variants(itertools.product(WAYS, values), *quick))


by_unit = partial(compiled, bucket="module")  # each unit has one collective, so that tests can count them
COUNTED = {**WAYS, "by unit": by_unit}


def planned_ops(graph: GraphReport) -> Counter[str]:
    """Count compiled_fsdp's ops and the functional collectives in the planned graph, before it is lowered.

    Launches are counted by their kind: "gather", "reduce", or "all_reduce" over replicas.
    """
    ops = Counter(re.findall(r"torch\.ops\.(?:compiled_fsdp|_c10d_functional)\.(\w+)\.", graph.planned))
    launches = re.findall(r"launch\.default\(.*'(\w+) \w+ (\w+); world", graph.planned)
    assert ops.pop("launch", 0) == len(launches)
    return ops + Counter("all_reduce" if "all_reduce" in transport else kind for kind, transport in launches)


def collectives_of(run: Callable[[], Any], prefix: str = "gloo:") -> list[str]:
    """Return the collectives that gloo did on this rank while `run()` ran, in the order of their start.

    An entry is, for example, "all_gather [[992]]". gloo's two threads may start two collectives in either order. With
    the prefix "_c10d_functional::" the result has launches and waits, whose order is fixed.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run()
    events = [event for event in profiled.events() if event.name.startswith(prefix)]
    events.sort(key=lambda event: event.time_range.start)
    return [f"{event.name.removeprefix(prefix)} {event.input_shapes}" for event in events]


def counted(run) -> Counter[str]:
    """Count the launches of functional collectives by kind. An all-to-all counts as a reduce-scatter ("RS")."""
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
    """Return a mesh of all ranks over a new process group, in which the ranks have agreed on nothing yet.

    In a group that already knows a model, a rank with that model asks no other rank, and waits in a gather.
    """
    return DeviceMesh.from_group(dist.new_group(), "cpu")


def two_layers(rows: int = 4, layers: int = 2, **options: Any) -> nn.Module:
    """Return linear layers in one unit. The first has 4 rows, the others have `rows`."""
    return fully_shard(nn.Sequential(nn.Linear(4, 4), *(nn.Linear(4, rows) for _ in range(layers - 1))), **options)
