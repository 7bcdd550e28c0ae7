"""State dicts, checkpoints, optimizers and clipping see what FSDP2 shows them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grad_norm_

from compiled_fsdp import fully_shard
from tests.harness import (
    assert_same,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    loss_of,
    shard,
    train,
)
from tests.harness.checkpoints import assert_equal, everyone_alike, full, state_of
from tests.harness.models import small


# ---- state dicts -----------------------------------------------------------------------------------------------------
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


# ---- distributed checkpoints -----------------------------------------------------------------------------------------
def save(rank: int, world_size: int, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict]:
    """Train, save, and go on: the state that was saved, the next step's loss, and the state after it."""
    model = shard(small(), fully_shard)
    run, optimizer = compiled(model), torch.optim.AdamW(model.parameters(), lr=0.01)
    train(run, optimizer=optimizer, steps=2)
    model_state, optimizer_state = get_state_dict(run, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    saved = state_of(model, optimizer)
    return saved, train(run, everyone_alike, optimizer=optimizer, steps=1).losses[0], state_of(model, optimizer)


def load(rank: int, world_size: int, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict]:
    """What `save` returns, by loading."""
    model = shard(small(seed=1), fully_shard)
    run, optimizer = compiled(model) if world_size == 2 else model, torch.optim.AdamW(model.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(run, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(run, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    saved = state_of(model, optimizer)
    return saved, train(run, everyone_alike, optimizer=optimizer, steps=1).losses[0], state_of(model, optimizer)


def test_checkpoint_of_two_ranks_on_two_four_and_one(ranks, tmp_path):
    """With AdamW's state. Four equal gradients sum to four times one of them exactly, so a step is equal as well."""
    expected = ranks.get(2).run(save, folder=tmp_path)[0]
    assert any(key.endswith(": exp_avg_sq") for key in expected[0])
    for world_size in (2, 4, 1):
        for saved, loss, after in ranks.get(world_size).run(load, folder=tmp_path):
            assert_equal(saved, expected[0])
            assert torch.equal(loss, expected[1])
            assert_equal(after, expected[2])


# ---- optimizers and clipping -----------------------------------------------------------------------------------------
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW for-loop": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "ASGD": (torch.optim.ASGD, {}),
}


@distributed(world_size=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_with_fsdp2(rank, world_size, name):
    make, options = OPTIMIZERS[name]

    def steps(model: nn.Module) -> Any:
        return train(model, optimizer=make(model.parameters(), **options), steps=3)

    assert_same(steps(shard(small(), fully_shard)), steps(fsdp2(small())))


@distributed(world_size=2)
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_clip_grad_norm(rank, world_size, norm):
    models = [shard(small(), fully_shard), fsdp2(small())]
    norms = []
    for model in models:
        forward_backward(model, 0)
        norms.append(clip_grad_norm_(model.parameters(), 1e-2, norm_type=norm).full_tensor())
    assert torch.equal(*norms)
    assert norms[0] > 1e-2, "or nothing is clipped"
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(ours.grad), full(theirs.grad))


# ---- moved after sharding --------------------------------------------------------------------------------------------
MOVES = {
    "float64": lambda model: model.to(torch.float64),
    "bfloat16": lambda model: model.bfloat16(),
    "cpu": lambda model: model.to("cpu"),
    "half and back": lambda model: model.half().float(),
}


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("way", "move"), [*(("eager", move) for move in MOVES), ("compiled", "float64"), ("compiled", "half and back")]
)
def test_moved_after_sharding_and_a_step(rank, world_size, way, move):
    """FSDP2 is sharded after the move."""
    model = shard(small(), fully_shard)
    run = compiled(model) if way == "compiled" else model
    forward_backward(run, 0)
    model.zero_grad()
    MOVES[move](model)
    assert_same(train(run, steps=2), train(fsdp2(MOVES[move](small())), steps=2))


@distributed(world_size=2)
@pytest.mark.parametrize("root_only", [False, True])
def test_meta_then_to_empty_then_values(rank, world_size, root_only):
    """Materialized by reset_parameters, or by loading."""
    with torch.device("meta"):
        model = small()
    if root_only:
        fully_shard(model)
    else:
        shard(model, fully_shard)
    assert all(param.is_meta and isinstance(param, DTensor) for param in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    plain = small()
    plain.load_state_dict({name: full(param) for name, param in model.named_parameters()})
    loss = loss_of(model, 0, 0)
    assert loss.isfinite()
    assert torch.equal(loss, loss_of(plain, 0, 0)), "a forward reads the new values"
    set_model_state_dict(model, small().state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_same(train(compiled(model), steps=2), fsdp2_record(small(), steps=2))
