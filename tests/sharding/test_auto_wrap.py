"""Units by policy: those that FSDP1 makes of the same policy, sharded as by hand, or a named error."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor

from compiled_fsdp import FSDPModule, explain, fully_shard
from tests.harness import Transformer, assert_same, compiled, distributed, fsdp2_record, shard, train
from tests.harness.fake import fake_group
from tests.harness.models import Attention, Block, small
from tests.harness.untouched import refused


class Mixed(nn.Module):
    """What size-based policies treat in ways of their own: attention that stays whole, containers that are never
    wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)  # 1088 elements
        self.list = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))  # 272 each
        self.dict = nn.ModuleDict({"small": nn.Linear(8, 8), "large": nn.Linear(32, 32)})  # 72, 1056
        self.sequence = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(300))


def names_of(model: nn.Module, kind: type) -> list[str]:
    """The modules of a kind, without FSDP1's wrappers in their names."""
    names = [name for name, module in model.named_modules() if isinstance(module, kind)]
    return [".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module") for name in names]


def units(model: nn.Module) -> list[str]:
    return names_of(model, FSDPModule)


def sizes(least: int, **options: Any) -> Callable[..., bool]:
    return partial(size_based_auto_wrap_policy, min_num_params=least, **options)


def own(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Counts on what is left, and does not look into sequences."""
    return not isinstance(module, nn.Sequential) if recurse else 200 < nonwrapped_numel < 600


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


# the same units by both kinds of policy
BLOCKS = ModuleWrapPolicy({Block}), partial(lambda_auto_wrap_policy, lambda_fn=is_block)
# a policy, and how many units it makes of each model, so that none makes all or nothing by mistake
POLICIES: dict[str, tuple[Any, int, int]] = {
    "classes": (ModuleWrapPolicy({Block, nn.Linear}), 16, 10),
    "nested classes": (ModuleWrapPolicy([Block, Attention, nn.MultiheadAttention]), 5, 2),
    "custom": (CustomPolicy(lambda module: isinstance(module, (nn.LayerNorm, nn.ReLU))), 6, 2),
    "custom, the root too": (CustomPolicy(lambda module: isinstance(module, (Transformer, Mixed, nn.ReLU))), 1, 2),
    "transformer": (partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.Sequential}), 3, 3),
    "lambda": (partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Sequential)), 1, 3),
    "sizes by default": (size_based_auto_wrap_policy, 1, 1),
    "sizes, all but small ones": (sizes(200), 16, 6),
    "sizes, some": (sizes(1000), 15, 2),
    "sizes, of what is left": (sizes(400), 16, 3),
    "sizes, larger than the model": (sizes(10**6), 1, 1),
    "sizes, other leaves": (sizes(200, force_leaf_modules={nn.Sequential, Attention}), 10, 7),
    "sizes, other exclusions": (sizes(200, exclude_wrap_modules={nn.Linear, nn.ModuleList, nn.ModuleDict}), 7, 2),
    "own": (own, 2, 5),
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [Transformer, Mixed])
@pytest.mark.filterwarnings("ignore")
def test_units_are_fsdp1s(policy, make):
    policy, *counts = POLICIES[policy]
    with fake_group(2):
        model = make()
        assert fully_shard(model, auto_wrap_policy=policy) is model
        theirs = FullyShardedDataParallel(make(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
        assert units(model) == names_of(theirs, FullyShardedDataParallel)
        assert len(units(model)) == counts[make is Mixed]
        assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_ignored_parameters_do_not_count():
    """Without its weight the third linear of the list is below the size, with it above."""
    with fake_group(2):
        model, theirs = Mixed(), Mixed()
        arguments = {"auto_wrap_policy": sizes(200)}
        fully_shard(model, ignored_params={model.list[2].weight}, **arguments)
        theirs = FullyShardedDataParallel(
            theirs, ignored_states=[theirs.list[2].weight], device_id=torch.device("cpu"), **arguments
        )
        assert units(model) == names_of(theirs, FullyShardedDataParallel)
        assert "list.1" in units(model)
        assert "list.2" not in units(model)
        assert not isinstance(model.list[2].weight, DTensor)
        assert isinstance(model.list[2].bias, DTensor)


@pytest.mark.parametrize("policy", BLOCKS)
def test_every_unit_gets_the_same_arguments(policy):
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "shard"))["shard"]
        asked = []
        model = Transformer()
        fully_shard(model, mesh=mesh, reshard_after_forward=False, shard_placement_fn=asked.append,
                    auto_wrap_policy=policy)  # fmt: skip
        assert units(model) == ["", "blocks.0", "blocks.1"]
        assert {param.device_mesh for param in model.parameters()} == {mesh}
        assert all(module._fsdp_unit.keep_for_backward for module in model.modules() if isinstance(module, FSDPModule))
        assert len(asked) == 25


def test_a_dictionary_overrides_arguments_for_one_unit():
    """The root's own are those of the call, whatever the policy says of it."""
    with fake_group(2):
        model = Transformer()
        special = {model.blocks[1]: {"reshard_after_forward": False, "ignored_params": {model.blocks[1].up.weight}},
                   model.blocks[0]: True, model: {"reshard_after_forward": False}}  # fmt: skip
        policy = CustomPolicy(lambda module: special.get(module, False))
        fully_shard(model, reshard_after_forward=True, auto_wrap_policy=policy)
        assert units(model) == ["", "blocks.0", "blocks.1"]
        kept = [module._fsdp_unit.keep_for_backward for module in (model, model.blocks[0], model.blocks[1])]
        assert kept == [False, False, True]
        plain = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
        assert plain == ["blocks.1.up.weight"]
        assert len(model._fsdp_unit.parameters) == 5


def test_inner_units_come_first():
    """So each has what no unit inside of it has, and the units know of each other."""
    with fake_group(2):
        model = fully_shard(Transformer(blocks=1), auto_wrap_policy=ModuleWrapPolicy({Block, Attention}))
        block, attention = model.blocks[0]._fsdp_unit, model.blocks[0].attention._fsdp_unit
        assert {parameter.name for parameter in attention.parameters} == {
            f"blocks.0.attention.{name}.weight" for name in "qkvo"
        }
        assert len(block.parameters) == 6
        assert block.inner_units == [attention]
        assert [unit.is_root for unit in (model._fsdp_unit, block, attention)] == [True, False, False]


def test_what_is_sharded_already_stays_as_it_is():
    """Such as a pair with tied weights, which no policy puts into one unit. Nor does it count."""
    with fake_group(2):
        model = Transformer(ties=True)
        fully_shard([model.embedding, model.head])
        fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({Block, nn.Embedding}))
        assert units(model) == ["", "embedding", "position", "blocks.0", "blocks.1", "head"]
        assert model.embedding._fsdp_unit is model.head._fsdp_unit
        assert model.head.weight is model.embedding.weight

        sequence = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Linear(4, 4)), nn.Linear(16, 16))
        fully_shard(sequence[0][0])
        fully_shard(sequence, auto_wrap_policy=sizes(100))
        assert units(sequence) == ["", "0.0", "1"]  # of 0 but 20 elements are left


def test_a_module_in_two_places_is_one_unit():
    for policy in (ModuleWrapPolicy({nn.Linear}), sizes(10)):
        with fake_group(2):
            linear = nn.Linear(4, 4)
            model = fully_shard(nn.Sequential(nn.Sequential(linear), nn.Sequential(linear)), auto_wrap_policy=policy)
            assert units(model) == ["", "0.0"]
            assert model[1][0] is linear
            assert model._fsdp_unit.inner_units == [linear._fsdp_unit]


# ---- training --------------------------------------------------------------------------------------------------------
@distributed(world_size=2)
def test_as_sharded_by_hand(rank, world_size):
    """The same units, plans, losses, gradients and parameters as a call for each block and one for the root."""
    expected = fsdp2_record(small(blocks=2))
    by_hand = shard(small(blocks=2), fully_shard)
    assert_same(train(compiled(by_hand)), expected)
    planned = [graph.plan for graph in explain(by_hand).graphs]
    torch.compiler.reset()  # or both would share compiled code, and its plans
    models = [fully_shard(small(blocks=2), auto_wrap_policy=policy) for policy in BLOCKS]
    assert_same(train(compiled(models[0])), expected)
    assert len(planned) == 2
    assert planned == [graph.plan for graph in explain(models[0]).graphs]
    assert_same(train(models[1]), expected)  # uncompiled
    for model in models:
        assert explain(model).units == explain(by_hand).units == 3
        assert [p.placements for p in model.parameters()] == [p.placements for p in by_hand.parameters()]


@distributed(world_size=2)
def test_units_inside_of_units_train(rank, world_size):
    """By size, down to single layers, with parameters of the root that are ignored."""
    expected = small()
    model = small()
    ignored = {model.norm.weight, model.norm.bias}
    torch.distributed.fsdp.fully_shard(expected, ignored_params={expected.norm.weight, expected.norm.bias})
    fully_shard(model, auto_wrap_policy=sizes(900), ignored_params=ignored)
    assert units(model) == ["", "embedding", "blocks.0.up", "blocks.0.down", "head"]
    assert_same(train(compiled(model)), train(expected))


# ---- errors ----------------------------------------------------------------------------------------------------------
def no_arguments() -> bool:
    return True


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ({Block}, r"auto_wrap_policy should be a policy .* such as ModuleWrapPolicy\(\{Block\}\), .* but got set"),
        ("transformer", "but got str"),
        (transformer_auto_wrap_policy,
         "transformer_auto_wrap_policy does not take them: missing .*'transformer_layer_cls'.*functools.partial"),
        (ModuleWrapPolicy, "ModuleWrapPolicy does not take them: .* if it is a class, pass an instance"),
        (no_arguments, "no_arguments does not take them: .*unexpected keyword argument 'module'"),
        (CustomPolicy(lambda module: "yes"), "should return False/True or a kwarg dict, but it returned yes"),
        (CustomPolicy(lambda module: {"sharding_strategy": "FULL_SHARD"} if is_block(module) else False),
         "gives 'blocks.0' the argument 'sharding_strategy', which fully_shard does not have; "
         "it takes mesh, reshard_after_forward, "),
        (CustomPolicy(lambda module: {"auto_wrap_policy": None} if is_block(module) else False),
         "the argument 'auto_wrap_policy'"),
        (CustomPolicy(lambda module: {"reshard_after_forward": 1.0} if is_block(module) else False),
         "reshard_after_forward .* but got float"),
        (always_wrap_policy, "containers that do not implement forward"),
    ],
)  # fmt: skip
def test_what_is_no_policy(policy, match):
    model = Transformer()
    with fake_group(2), refused(ValueError, match, model):
        fully_shard(model, auto_wrap_policy=policy)


def test_a_list_of_modules():
    model = Transformer()
    with fake_group(2), refused(ValueError, "inside of one module, but module is a list", model):
        fully_shard([model.embedding, model.head], auto_wrap_policy=ModuleWrapPolicy({Block}))


def test_parameters_tied_across_the_units_of_a_policy():
    tied = r"is shared with 'embedding\.weight' of Transformer, of another unit.*fully_shard\(\[module_a, module_b\]\)"
    for classes, match in [
        ({nn.Embedding}, rf"'head\.weight' of Transformer {tied}"),
        ({nn.Embedding, nn.Linear}, tied),
    ]:
        model = Transformer(ties=True)
        with fake_group(2), refused(ValueError, match, model):
            fully_shard(model, auto_wrap_policy=ModuleWrapPolicy(classes))
    with fake_group(2):
        fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({Block}))  # a way out: both in the root
        assert model.head.weight is model.embedding.weight


def test_a_bad_unit_leaves_the_others_unsharded():
    """Whichever it is: all are checked before the first is changed."""
    for bad in ("blocks.0.norm1", "blocks.1.norm1", "norm"):
        model = Transformer()
        model.get_submodule(bad).odd = nn.Parameter(torch.ones(()))
        with fake_group(2), refused(ValueError, rf"scalar parameters. Change '{bad}.odd' of Transformer", model):
            fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({Block}))


def test_applied_twice():
    with fake_group(2):
        model = fully_shard(Transformer(), auto_wrap_policy=ModuleWrapPolicy({Block}))
        with refused(ValueError, "already applied to this Transformer", model):
            fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}))
