"""``fully_shard`` raises in the middle of its work: the model is as it was before the call."""

import copy
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from compiled_fsdp import fully_shard
from compiled_fsdp.frontend import fully_shard as sharding
from compiled_fsdp.frontend import parametrize
from compiled_fsdp.frontend.forward_hooks import ForwardHooks
from compiled_fsdp.state import registry
from compiled_fsdp.state.unit import Unit
from tests.harness import assert_same, distributed, train, variants
from tests.harness.models import Block, Transformer
from tests.harness.untouched import local, refused


class Told(Exception):
    """To fail."""


def failing(owner: object, name: str, after: int):
    """``owner.name`` raises once it was called so many times."""
    calls, real = [], getattr(owner, name)

    def fails(*args, **kwargs):
        calls.append(name)
        if len(calls) > after:
            raise Told(f"{name} was called {len(calls)} times")
        return real(*args, **kwargs)

    return mock.patch.object(owner, name, fails)


# Of two blocks and the root, with 25 parameters in all.
PLACES = [
    (sharding, "ShardedParameter", 12), (sharding, "broadcast_states", 20), (sharding, "Unit", 1),
    (sharding, "register", 2), (sharding, "give_gate", 17), (Unit, "take_in", 2), (sharding, "change_class", 9),
    (parametrize, "_make_class", 1), (nn.Module, "register_load_state_dict_post_hook", 6),
    (sharding, "answer_as_fsdp2", 1), (sharding, "expect_fsdps_mark", 2), (Unit, "name_from", 3),
    (sharding, "sign_in", 1), (ForwardHooks, "register", 2), (sharding, "watch_optimizers", 2),
]  # fmt: skip


def model() -> Transformer:
    """With tied parameters, a buffer and a hook."""
    made = Transformer(ties=True)
    made.blocks[1].register_buffer("scale", torch.ones(32))
    made.blocks[0].register_forward_hook(lambda module, args, output: output * module.norm1.weight.shape[0] / 32)
    return made


def step(model: nn.Module, index: int) -> torch.Tensor:
    tokens = torch.arange(8).reshape(2, 4) + index
    loss = model(tokens).square().mean()
    loss.backward()
    return loss.detach()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(tensor).clone() for name, tensor in model.state_dict().items()}


def units_over(model: nn.Module) -> set[Unit]:
    modules = set(model.modules())
    return {unit for unit in registry._all_units if modules.intersection(unit.modules)}


@distributed(world_size=2)
@pytest.mark.parametrize("calls", variants(["one", "several"], "one"))
def test_at_any_place(rank, world_size, calls):
    """In the one call that makes all units, or in the root's where the blocks are units already."""
    expected = train(model(), step, steps=1)
    for owner, name, after in PLACES:
        failed = model()
        if calls == "several":
            for block in failed.blocks:
                fully_shard(block)
        with torch.no_grad():  # what the first rank would send
            failed.norm.bias.add_(rank)
        optimizer = torch.optim.AdamW(failed.parameters(), lr=0.01)
        values, units = tensors(failed), units_over(failed)
        policy = {"auto_wrap_policy": ModuleWrapPolicy({Block})} if calls == "one" else {}
        with (
            mock.patch.dict(parametrize._classes, clear=True),
            failing(owner, name, after if calls == "one" else 0),
            refused(Told, name, failed),
        ):
            fully_shard(failed, sync_module_states=True, **policy)
        assert units_over(failed) == units
        for key, value in tensors(failed).items():
            assert torch.equal(value, values[key]), f"{name}: {key}"
        with torch.no_grad():
            failed.norm.bias.zero_()
        if calls == "one":
            assert_same(train(fully_shard(copy.deepcopy(failed)), step, steps=1), expected)
            assert_same(train(failed, step, steps=1, optimizer=optimizer), expected)
        else:
            assert_same(train(fully_shard(failed), step, steps=1), expected)
