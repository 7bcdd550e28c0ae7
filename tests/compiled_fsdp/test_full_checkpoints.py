"""Checkpoints of a model that is hard to save, with AdamW's state: full ones, FSDP2's, asynchronous ones."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from compiled_fsdp import fully_shard
from tests.harness import compiled, distributed, shard, train
from tests.harness.checkpoints import Odd, assert_equal, everyone_alike, state_of

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

LIBRARIES = {"ours": fully_shard, "FSDP2": torch_fully_shard}
Tensors = dict[str, torch.Tensor]
After = tuple[Tensors, torch.Tensor, Tensors]  # what a checkpoint restores, the next step's loss, all after that step


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def trained(library: str = "ours") -> tuple[nn.Module, torch.optim.AdamW]:
    """A model and its optimizer, two steps old."""
    model = shard(Odd(), LIBRARIES[library])
    optimizer = adamw(model)
    train(model, optimizer=optimizer, steps=2)
    return model, optimizer


def empty(library: str = "ours") -> nn.Module:
    """A model on the meta device."""
    with torch.device("meta"):
        model = Odd()
    return shard(model, LIBRARIES[library])


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, run: nn.Module | None = None) -> After:
    """The state, and what a step makes of it."""
    state = state_of(model, optimizer)
    loss = train(model if run is None else run, everyone_alike, optimizer=optimizer, steps=1).losses[0]
    return state, loss, state_of(model, optimizer)


def assert_goes_on(actual: After, expected: After) -> None:
    assert_equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1]), "the next step's loss"
    assert_equal(actual[2], expected[2])


# ---- full state dicts ------------------------------------------------------------------------------------------------
def full_checkpoint(library: str) -> tuple[dict[str, Any], dict[str, Any], After]:
    """The full state dicts, and what has to follow from loading them."""
    model, optimizer = trained(library)
    states = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
    # on the CPU what has no dimensions is the live tensor
    return *copy.deepcopy(states), go_on(model, optimizer)


@distributed(world_size=2)
def test_full_state_dicts_are_a_plain_models(rank, world_size):
    """On rank 0 alone, plain tensors of a plain model, which goes on as the sharded one."""
    model_state, optimizer_state, expected = full_checkpoint("ours")
    if rank != 0:
        assert (model_state, optimizer_state) == ({}, {})
        return
    model = Odd(seed=1)
    assert list(model_state) == list(model.state_dict())
    assert list(optimizer_state["state"]) == [name for name, p in model.named_parameters() if p.requires_grad]
    tensors = [*model_state.values(), *(value for of in optimizer_state["state"].values() for value in of.values())]
    assert {(type(value), value.device.type) for value in tensors} == {(torch.Tensor, "cpu")}
    model.load_state_dict(model_state)
    optimizer = adamw(model, lr=0.5)
    set_optimizer_state_dict(model, optimizer, optimizer_state)
    assert_goes_on(go_on(model, optimizer), expected)


def used(library: str) -> nn.Module:
    model, optimizer = trained(library)
    optimizer.zero_grad()  # the helpers make an optimizer's state by a step, and leave what has gradients alone
    return model


HOW = {
    "into a fresh model": lambda library: shard(Odd(seed=1), LIBRARIES[library]),
    "after to_empty": lambda library: empty(library).to_empty(device="cpu"),
    "from meta": empty,
    "after training": used,
}


LOADS = [("ours", "ours", how) for how in HOW]
LOADS += [("FSDP2", "ours", "into a fresh model"), ("ours", "FSDP2", "into a fresh model")]


@distributed(world_size=2)
@pytest.mark.parametrize(("source", "target", "how"), LOADS)
def test_full_state_dicts_loaded_from_rank_0(rank, world_size, source, target, how):
    """Exactly equal, and so is the next step."""
    model_state, optimizer_state, expected = full_checkpoint(source)
    model = HOW[how](target)
    set_model_state_dict(model, model_state, options=FROM_RANK_0)
    optimizer = adamw(model, lr=0.5)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=FROM_RANK_0)
    run = compiled(model) if how == "after training" else model
    assert_goes_on(go_on(model, optimizer, run), expected)


@distributed(world_size=2)
def test_a_full_state_dict_loaded_while_unsharded(rank, world_size):
    """The helper takes what it sees for the layout: an error, as with FSDP2, which says what to do."""
    model, state = shard(Odd(), fully_shard), Odd(seed=1).state_dict()
    model.unshard()
    with pytest.raises(ValueError, match=r"'scale' is a plain tensor.*; call reshard\(\) before, since"):
        set_model_state_dict(model, dict(state), options=FROM_RANK_0)  # which it writes to
    model.reshard()
    set_model_state_dict(model, dict(state), options=FROM_RANK_0)
    assert_equal(state_of(model), state)


# ---- distributed checkpoints -----------------------------------------------------------------------------------------
def dcp_save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **options: bool) -> None:
    states = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)


def dcp_load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **options: bool) -> None:
    states = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=StateDictOptions(**options)
    )


def save(rank: int, world_size: int, library: str, folder: Path, **options: bool) -> After:
    model, optimizer = trained(library)
    dcp_save(model, optimizer, folder, **options)
    return go_on(model, optimizer)


def load(rank: int, world_size: int, library: str, folder: Path, **options: bool) -> After:
    """What `save` returns, by loading: into a fresh model, or one from the meta device."""
    model = empty(library).to_empty(device="cpu") if world_size == 4 else shard(Odd(seed=1), LIBRARIES[library])
    run = compiled(model, fullgraph=True) if (library, world_size) == ("ours", 2) else model
    optimizer = adamw(model, lr=0.5)
    dcp_load(run, optimizer, folder, **options)
    return go_on(model, optimizer, run)


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [("FSDP2", "ours", {}), ("ours", "FSDP2", {}), ("ours", "ours", {"flatten_optimizer_state_dict": True})],
)
def test_checkpoints_are_fsdp2s(ranks, tmp_path, source, target, options):
    """What FSDP2 saved we load, and the other way round, on as many ranks or others; the next step is the same."""
    expected = ranks.get(2).run(save, library=source, folder=tmp_path, **options)[0]
    for world_size in (2, 4, 1):
        for actual in ranks.get(world_size).run(load, library=target, folder=tmp_path, **options):
            assert_goes_on(actual, expected)


def test_checkpoint_as_a_file_of_plain_tensors(ranks, tmp_path):
    """By torch's own converter, without processes."""
    state, _, _ = ranks.get(2).run(save, library="ours", folder=tmp_path / "dcp")[0]
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "plain.pt")
    saved = torch.load(tmp_path / "plain.pt")["model"]
    assert_equal(saved, {key: state[key] for key in Odd().state_dict()})


class Held(dcp.FileSystemWriter):
    """Writes nothing before it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()

    def write_data(self, *args: Any) -> Any:
        assert self.may_write.wait(60)
        return super().write_data(*args)


@distributed(world_size=2)
def test_asynchronous_save(rank, world_size, tmp_path):
    """What is saved is what was there at the call; training goes on meanwhile."""
    model, optimizer = trained()
    run = compiled(model)
    group = dist.new_group(backend="gloo")  # the saving thread's own, beside training's collectives
    states = get_state_dict(run, optimizer)
    writer = Held(tmp_path)
    saving = dcp.async_save({"model": states[0], "optimizer": states[1]}, storage_writer=writer, process_group=group)
    expected = go_on(model, optimizer, run)
    train(run, optimizer=optimizer, steps=1)
    assert not saving.done()
    writer.may_write.set()
    saving.result()
    for name, value in expected[0].items():
        if name not in ("scale", "offset"):
            assert not torch.equal(value, state_of(model, optimizer)[name]), f"{name} did not change meanwhile"
    other = shard(Odd(seed=1), fully_shard)
    optimizer = adamw(other, lr=0.5)
    dcp_load(other, optimizer, tmp_path)
    assert_goes_on(go_on(other, optimizer), expected)
    dist.destroy_process_group(group)


# ---- through torch.compile's wrappers --------------------------------------------------------------------------------
def wrapped(model: nn.Module) -> nn.Module:
    return compiled(model)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    return model


def layers_wrapped(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = compiled(block)
    return model


WRAPPERS = {f.__name__: f for f in (wrapped, compiled_in_place, layers_wrapped)}


@distributed(world_size=2)
@pytest.mark.parametrize("how", WRAPPERS)
def test_compiled_models_save_and_load_under_the_plain_models_keys(rank, world_size, how, tmp_path):
    """What a compiled model saves a plain one loads, and the other way round, shards and full state dicts."""
    model, optimizer = trained()
    run = WRAPPERS[how](model)
    train(run, optimizer=optimizer, steps=1)
    states = get_state_dict(run, optimizer)
    assert states[0].keys() == Odd().state_dict().keys()
    assert states[1]["state"].keys() == {name for name, param in Odd().named_parameters() if param.requires_grad}
    dcp_save(run, optimizer, tmp_path)
    states = copy.deepcopy(get_state_dict(run, optimizer, options=FULL))

    plain = shard(Odd(seed=1), fully_shard)
    plain_optimizer = adamw(plain, lr=0.5)
    dcp_load(plain, plain_optimizer, tmp_path)
    expected = go_on(plain, plain_optimizer)
    for restore in ("from full state dicts", "from shards"):
        train(run, optimizer=optimizer, steps=1)
        if restore == "from shards":
            dcp_load(run, optimizer, tmp_path)
        else:
            set_model_state_dict(run, states[0], options=FROM_RANK_0)
            set_optimizer_state_dict(run, optimizer, states[1], options=FROM_RANK_0)
        loss = train(run, everyone_alike, optimizer=optimizer, steps=1).losses[0]
        assert torch.equal(loss, expected[1])
        after = state_of(model, optimizer)
        assert_equal({key.replace("_orig_mod.", ""): value for key, value in after.items()}, expected[2])


# ---- by hand ---------------------------------------------------------------------------------------------------------
@distributed(world_size=2)
@pytest.mark.parametrize("assign", [False, True])
def test_a_file_for_each_rank(rank, world_size, assign, tmp_path):
    """`torch.save` of the shards, and `torch.load` of them on as many ranks."""
    model, optimizer = trained()
    file = tmp_path / f"{rank}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = go_on(model, optimizer)
    states = torch.load(file)
    model = empty() if assign else shard(Odd(seed=1), fully_shard)
    assert not any(model.load_state_dict(states["model"], assign=assign))
    optimizer = adamw(model, lr=0.5)
    optimizer.load_state_dict(states["optimizer"])
    assert_goes_on(go_on(model, optimizer, compiled(model)), expected)


@distributed(world_size=2)
@pytest.mark.parametrize("library", LIBRARIES)
def test_full_tensors_distributed_by_hand(rank, world_size, library):
    """As in torch's tutorial on FSDP2: from the meta device, with `distribute_tensor` and `assign=True`."""
    model, optimizer = trained()
    full_states = copy.deepcopy(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))
    expected = go_on(model, optimizer)

    def sharded(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(like, DTensor) or value.dim() == 0:
            return value
        return distribute_tensor(value, like.device_mesh, like.placements)

    model = empty(library)
    meta = model.state_dict()
    model.load_state_dict({key: sharded(value, meta[key]) for key, value in full_states[0].items()}, assign=True)
    optimizer = adamw(model, lr=0.5)
    state = optimizer.state_dict()
    names = [name for name, param in model.named_parameters()]
    for index, name in enumerate(names):
        if name in full_states[1]["state"]:
            of = full_states[1]["state"][name]
            state["state"][index] = {key: sharded(value, model.get_parameter(name)) for key, value in of.items()}
    state["param_groups"] = [full_states[1]["param_groups"][0] | {"params": list(range(len(names)))}]
    optimizer.load_state_dict(state)
    assert_goes_on(go_on(model, optimizer), expected)
