"""States of models whose weights are torchao's tensors: saved and loaded by either library, with their optimizer's."""

import copy
import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import fully_shard
from tests.harness import distributed
from tests.harness.extensions import assert_all_equal

pytestmark = pytest.mark.more
pytest.importorskip("torchao")
import torchao.optim  # noqa: E402
from torchao.prototype.quantized_training import int8_mixed_precision  # noqa: E402

from tests.clients.quantized import KINDS, held, sharded, step_of  # noqa: E402

LIBRARIES = {"ours": fully_shard, "FSDP2": torch_fully_shard}
FLOAT8, NF4, INT8, INT8_ONLY = KINDS
# What DCP of torch must be told of torchao's classes, which it pickles; FSDP2's users as well.
PICKLED = [
    int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight,
    int8_mixed_precision.Int8MixedPrecisionTrainingConfig,
]


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    if kind == INT8_ONLY:  # its weights know a few operations
        return torch.optim.Adam(params, lr=0.01, foreach=False)
    return torch.optim.AdamW(params, lr=0.01)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What a rank holds of a model and its optimizer."""
    tensors = list(model.state_dict().values())
    for param in model.parameters():
        tensors += [value for value in optimizer.state.get(param, {}).values() if isinstance(value, torch.Tensor)]
    return [inner for tensor in tensors for inner in held(tensor)]


def trained(kind: str, library: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(kind, LIBRARIES[library])
    optimizer = optimizer_of(model, kind)
    for step in range(2):
        step_of(model, optimizer, step)
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_state_dicts(rank, world_size, kind):
    """What one library has trained the other loads and goes on with; the names and classes are the same."""
    found = {}
    for source, target in (("ours", "FSDP2"), ("FSDP2", "ours"), ("ours", "ours")):
        model, optimizer = trained(kind, source)
        loaded = sharded(kind, LIBRARIES[target], seed=1)
        its = optimizer_of(loaded, kind)
        loaded.load_state_dict(model.state_dict())
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_all_equal(everything(loaded, its), everything(model, optimizer))
        assert torch.equal(step_of(loaded, its, 2), step_of(model, optimizer, 2))
        assert_all_equal(everything(loaded, its), everything(model, optimizer))
        found[source] = {name: type(value.to_local()).__name__ for name, value in model.state_dict().items()}
    assert found["ours"] == found["FSDP2"]
    assert kind in found["ours"].values()


@pytest.mark.parametrize("kind", [FLOAT8, NF4])
@distributed(world_size=2)
def test_full_tensors(rank, world_size, kind):
    fulls = [[param.full_tensor() for param in trained(kind, library)[0].parameters()] for library in LIBRARIES]
    for ours, theirs in zip(*fulls, strict=True):
        assert type(ours) is type(theirs)
        assert_all_equal(list(held(ours)), list(held(theirs)))


@pytest.mark.parametrize(
    ("name", "kind"), [("AdamW8bit", FLOAT8), ("AdamW4bit", FLOAT8), ("AdamWFp8", FLOAT8), ("AdamW8bit", INT8_ONLY)]
)
@distributed(world_size=2)
def test_optimizers_of_few_bits(rank, world_size, name, kind):
    """Compiled as torchao does it, without Inductor."""
    found = []
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        for library in LIBRARIES.values():
            model = sharded(kind, library)
            optimizer = getattr(torchao.optim, name)(model.parameters(), lr=0.01)
            found.append([step_of(model, optimizer, step) for step in range(2)] + everything(model, optimizer))
    assert_all_equal(*found)


def save(rank: int, world_size: int, kind: str, library: str, folder: Path) -> torch.Tensor:
    model, optimizer = trained(kind, library)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    return step_of(model, optimizer, 2, alike=True)


def load(rank: int, world_size: int, kind: str, library: str, folder: Path) -> torch.Tensor:
    """What `save` returns, by loading."""
    model = sharded(kind, LIBRARIES[library], seed=1)
    optimizer = optimizer_of(model, kind)
    states = get_state_dict(model, optimizer)
    with torch.serialization.safe_globals(PICKLED):
        dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    return step_of(model, optimizer, 2, alike=True)


WORLDS = {FLOAT8: (2, 4), NF4: (2,), INT8: (2, 4)}
"""How many ranks load what two have saved: NF4 cannot be cut anew, and `INT8_ONLY` not be saved, with FSDP2 as well."""


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize(("source", "target"), [("FSDP2", "ours"), ("ours", "FSDP2"), ("ours", "ours")])
def test_distributed_checkpoints(ranks, tmp_path, kind, source, target):
    expected = ranks.get(2).run(save, kind=kind, library=source, folder=tmp_path)[0]
    for world_size in WORLDS[kind]:
        for actual in ranks.get(world_size).run(load, kind=kind, library=target, folder=tmp_path):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
