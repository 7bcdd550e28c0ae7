"""Full state dicts, saved and loaded by torch's helpers and by hand."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from compiled_fsdp import fully_shard
from tests.harness import compiled, distributed, shard
from tests.harness.checkpoints import Odd, state_of
from tests.harness.reference import assert_equal
from tests.harness.resumed import FROM_RANK_0, FULL, LIBRARIES, After, adamw, empty, go_on, trained


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
    assert_equal(go_on(model, optimizer), expected)


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
    assert_equal(go_on(model, optimizer, run), expected)


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
    assert_equal(go_on(model, optimizer), expected)
