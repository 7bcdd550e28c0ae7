"""State dicts see what FSDP2 shows them; checkpoints of them are loaded on any number of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from compiled_fsdp import fully_shard
from tests.harness import assert_same, compiled, distributed, forward_backward, fsdp2_record, loss_of, shard, train
from tests.harness.models import small
from tests.harness.reference import assert_equal, full
from tests.harness.resumed import After, go_on


@distributed(world_size=2)
def test_state_dict_has_the_plain_models_keys(rank, world_size):
    model = shard(small(), fully_shard)
    model.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    forward_backward(model, 0)
    plain = small().state_dict()
    assert list(model.state_dict()) == list(plain)
    assert list(compiled(model).state_dict()) == [f"_orig_mod.{key}" for key in plain]  # torch's own wrapper
    assert list(get_model_state_dict(compiled(model))) == list(plain)
    for key, value in model.state_dict().items():
        assert isinstance(value, DTensor), key
        assert value.placements == (Shard(0),), key
        assert (value.shape, value.dtype) == (plain[key].shape, plain[key].dtype), key
        assert torch.equal(value.full_tensor(), plain[key]), key


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_state_dict_aliases_the_live_shards(rank, world_size, way):
    """Between forward and backward, too; writing through it changes what the next forward reads."""
    model = shard(small(), fully_shard, reshard_after_forward=False)
    run = compiled(model) if way == "compiled" else model
    states = [model.state_dict()]
    loss = loss_of(run, rank, 0)
    states.append(model.state_dict())
    loss.backward()
    states.append(model.state_dict())
    for key, param in model.named_parameters():
        for state in states:
            assert state[key].to_local().data_ptr() == param.to_local().data_ptr(), key
    assert torch.equal(loss_of(run, rank, 0), loss), "the state dict changed nothing"
    for value in states[0].values():
        value.to_local().mul_(0.5)
    halved = small()
    halved.load_state_dict({key: value * 0.5 for key, value in halved.state_dict().items()})
    assert torch.equal(loss_of(run, rank, 0), loss_of(halved, rank, 0))


@distributed(world_size=2)
@pytest.mark.parametrize("assign", [False, True])
def test_plain_tensors_loaded(rank, world_size, assign):
    model = shard(small(), fully_shard)
    state = small(seed=1).state_dict()
    block = {key: value for key, value in state.items() if key.startswith("blocks.0.")}
    with pytest.raises(ValueError, match=r"'blocks\.0\.norm2\.weight' is a plain tensor.*DTensor") as error:
        model.load_state_dict(block, assign=assign, strict=False)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    for key, value in small().state_dict().items():
        assert torch.equal(full(model.state_dict()[key]), value), f"{key} was written"
    assert "set_model_state_dict" in str(error.value)  # the way out, which has to work as it says:
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    assert_same(train(model, steps=1), fsdp2_record(small(seed=1), steps=1))


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_load_state_dict_with_assign(rank, world_size, way):
    model = shard(small(), fully_shard)
    run = compiled(model) if way == "compiled" else model
    forward_backward(run, 0)
    model.zero_grad()
    result = model.load_state_dict(shard(small(seed=1), fully_shard).state_dict(), assign=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_same(train(run), fsdp2_record(small(seed=1)))


@distributed(world_size=2)
def test_strict_loading_names_what_is_wrong(rank, world_size):
    model = shard(small(), fully_shard)
    state = model.state_dict()
    state["blocks.0.extra"] = state.pop("blocks.0.up.weight")
    with pytest.raises(RuntimeError, match=r'(?s)Missing.*"blocks\.0\.up\.weight".*Unexpected.*"blocks\.0\.extra"'):
        model.load_state_dict(state)


def save(rank: int, world_size: int, folder: Path) -> After:
    """Train, save, and go on."""
    model = shard(small(), fully_shard)
    run, optimizer = compiled(model), torch.optim.AdamW(model.parameters(), lr=0.01)
    train(run, optimizer=optimizer, steps=2)
    model_state, optimizer_state = get_state_dict(run, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return go_on(model, optimizer, run)


def load(rank: int, world_size: int, folder: Path) -> After:
    """What `save` returns, by loading."""
    model = shard(small(seed=1), fully_shard)
    run, optimizer = compiled(model) if world_size == 2 else model, torch.optim.AdamW(model.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(run, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(run, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return go_on(model, optimizer, run)


def test_checkpoint_of_two_ranks_on_two_four_and_one(ranks, tmp_path):
    """With AdamW's state. Four equal gradients sum to four times one of them exactly, so a step is equal as well."""
    expected = ranks.get(2).run(save, folder=tmp_path)[0]
    assert any(key.endswith(": exp_avg_sq") for key in expected[0])
    for world_size in (2, 4, 1):
        for found in ranks.get(world_size).run(load, folder=tmp_path):
            assert_equal(found, expected)
