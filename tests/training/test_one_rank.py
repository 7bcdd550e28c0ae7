"""A group of one rank, on the CPU and, where there is one, on a GPU with NCCL: FSDP2's numbers."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.utils import clip_grad_norm_

from compiled_fsdp import explain, fully_shard
from tests.harness import (
    Record,
    assert_same,
    compiled,
    forward_backward,
    fsdp2,
    shard,
    train,
)
from tests.harness.fake import one_rank
from tests.harness.models import Broken, Checkpointed, small

GPU = pytest.param("cuda", marks=pytest.mark.cuda)
KEPT = {"collectives_at_world_size_1": True, "kernels": True, "hardware": "h100", "bucket": "module", "verify": "full"}
"""Everything of several ranks but the others: collectives, and our kernels on both sides of them."""


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with one_rank(request.param):
        yield request.param


def clipped(model: nn.Module, step: int) -> torch.Tensor:
    loss = forward_backward(model, step)
    clip_grad_norm_(model.parameters(), 0.1)
    return loss


def accumulated(model: nn.Module, step: int) -> torch.Tensor:
    """Two microbatches, of which the last one communicates."""
    inner = getattr(model, "_orig_mod", model)
    for last in (False, True):
        inner.set_requires_gradient_sync(last)
        loss = forward_backward(model, 2 * step + last)
    return loss


def on_the_cpu() -> nn.Module:
    """What is offloaded begins there."""
    with torch.device("cpu"):
        return small()


half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Build = Callable[[], nn.Module]

SCENARIOS: dict[str, tuple[Build, dict[str, object], Callable[[nn.Module, int], torch.Tensor]]] = {
    "float32": (small, {}, forward_backward),
    "bf16": (small, {"mp_policy": half}, forward_backward),
    "clipping": (small, {}, clipped),
    "accumulation": (small, {}, accumulated),
    "checkpoints": (partial(small, blocks=2, cls=Checkpointed), {}, forward_backward),
    "graph breaks": (partial(small, blocks=2, cls=Broken), {}, forward_backward),
    "offload": (on_the_cpu, {"offload_policy": CPUOffloadPolicy()}, forward_backward),
}


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        *(pytest.param(scenario, {}, id=f"{scenario}-alone") for scenario in SCENARIOS),
        pytest.param("accumulation", KEPT, id="accumulation-collectives kept"),
        *(
            pytest.param(scenario, KEPT, id=f"{scenario}-collectives kept", marks=pytest.mark.more)
            for scenario in SCENARIOS
            if scenario != "accumulation"
        ),
    ],
)
def test_numbers_are_fsdp2s(device, scenario, options):
    """Bit for bit on the CPU. On a GPU kernels add in another order, and AdamW enlarges what is left of that."""
    if scenario == "offload" and device == "cpu":
        pytest.skip("nothing is elsewhere")
    build, how, step = SCENARIOS[scenario]
    model = shard(build(), fully_shard, **how)
    ours = train(compiled(model, **options), step)
    limits = {} if device == "cpu" else {"rtol": 1e-5, "rtol_of_parameters": 1e-3}
    assert_same(on_cpu(ours), on_cpu(train(fsdp2(build(), **how), step)), **limits)
    if options and scenario not in ("accumulation", "graph breaks"):
        # a bucket for each unit goes out, by kernels but for what is offloaded
        (forward,) = [graph for graph in explain(model).graphs if graph.phase == "forward"]
        assert forward.count("gather") == 1 + len(model.blocks)
        assert ("kernels pack 0" in forward.summary["lower"]) == (scenario == "offload")


def on_cpu(record: Record) -> Record:
    """Its tensors where they can be compared."""
    return Record(
        [loss.cpu() for loss in record.losses],
        *([{k: None if t is None else t.cpu() for k, t in step.items()} for step in steps]
          for steps in (record.gradients, record.parameters)),
    )  # fmt: skip
