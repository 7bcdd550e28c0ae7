"""Checkpoints in files, with AdamW's state: FSDP2's, asynchronous ones, of compiled models, and a file for each
rank."""

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
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from compiled_fsdp import fully_shard
from tests.harness import compiled, distributed, shard, train, variants
from tests.harness.checkpoints import Odd, everyone_alike, state_of
from tests.harness.reference import assert_equal
from tests.harness.resumed import FROM_RANK_0, FULL, LIBRARIES, After, adamw, empty, go_on, trained


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
    [
        ("FSDP2", "ours", {}),
        ("ours", "FSDP2", {}),
        ("ours", "ours", {"flatten_optimizer_state_dict": True}),
        ("ours", "replicated", {}),
        ("replicated", "ours", {}),
    ],
)
def test_checkpoints_are_fsdp2s(ranks, tmp_path, source, target, options):
    """What FSDP2 saved we load, and the other way round, on as many ranks or others; the next step is the same. What a
    sharded model saved a replicated one loads, and the other way round."""
    expected = ranks.get(2).run(save, library=source, folder=tmp_path, **options)[0]
    for world_size in (2, 4, 1):
        for actual in ranks.get(world_size).run(load, library=target, folder=tmp_path, **options):
            assert_equal(actual, expected)


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
    assert_equal(go_on(other, optimizer), expected)
    dist.destroy_process_group(group)


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
@pytest.mark.parametrize("how", variants(WRAPPERS, "wrapped", "compiled_in_place"))
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
    assert_equal(go_on(model, optimizer, compiled(model)), expected)
