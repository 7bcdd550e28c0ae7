"""What torch's own code and other libraries ask of a module that FSDP2 sharded, and programs that put ours in FSDP2's
place."""

import logging
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register
from torch.distributed.fsdp import share_comm_ctx as torch_share_comm_ctx
from torch.distributed.tensor import DTensor

from compiled_fsdp import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx
from tests.harness import Transformer, assert_same, compiled, distributed, fsdp2, shard, train
from tests.harness.fake import fake_group
from tests.harness.logs import logged
from tests.harness.models import Encoder, small


@distributed(world_size=2)
def test_ours_in_the_place_of_fsdp2s(rank, world_size):
    """As users of accelerate have to do it. A model that torch's own shards meanwhile is still told from ours."""
    with (
        mock.patch.object(torch.distributed.fsdp, "fully_shard", fully_shard),
        mock.patch.object(torch.distributed.fsdp, "FSDPModule", FSDPModule),
    ):
        model = shard(small(), torch.distributed.fsdp.fully_shard)
        theirs = fsdp2(small())
        assert_same(train(compiled(model)), train(theirs))
        assert torch.distributed.fsdp.fully_shard.state(model) is torch_fully_shard.state(model)
        with pytest.raises(ValueError, match=r"sharded by torch\.distributed\.fsdp\.fully_shard"):
            fully_shard(theirs)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_marks_for_dynamo(rank, world_size, how):
    """transformers sets the first of FSDP2's two; alone it breaks the graph."""
    model = shard(small(blocks=2), fully_shard)
    model._is_fsdp_managed_module = True
    for block in model.blocks:
        block._is_fsdp_managed_module = True
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend="compiled_fsdp", fullgraph=True, options={"codegen": "aot_eager"})
    counters.clear()
    assert_same(train(compiled(model, fullgraph=True) if how == "whole" else model), train(fsdp2(small(blocks=2))))
    assert counters["stats"]["unique_graphs"] == 1  # equal blocks share theirs


@distributed(world_size=1)
def test_marks_of_fsdp2(rank, world_size):
    """On every module of a unit; but for the one that makes symbols of integers."""
    model = shard(Transformer(), fully_shard)
    theirs = shard(Transformer(), torch_fully_shard)
    for mine, other in zip(model.modules(), theirs.modules(), strict=True):
        assert mine._fsdp_use_orig_params is other._fsdp_use_orig_params is True, type(mine)
        assert not hasattr(mine, "_is_fsdp_managed_module")
        assert sorted(_get_registry(mine) or ()) == sorted(_get_registry(other) or ()), type(mine)
        if isinstance(other, TorchFSDPModule):
            assert type(mine).__mro__[type(mine)._orig_cls_mro_index] is type(other).__mro__[2]


@distributed(world_size=2)
@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)])
@pytest.mark.parametrize("function", ["torchs", "ours"])
def test_registered_methods(rank, world_size, function, policy):
    """torch's register_fsdp_forward_method, which transformers' Trainer calls, and ours: inputs and outputs are cast as
    in forward."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))

    def build(shard_by, register):
        model = Encoder()
        for module in (model.layer, model):
            shard_by(module, **({} if policy is None else {"mp_policy": policy}))
        register(model, "encode")
        return model

    dtypes = []

    def step(model, index):
        encoded = model.encode(x * (index + 1))
        dtypes.append(encoded.dtype)
        loss = model(encoded).square().mean()
        loss.backward()
        return loss.detach()

    mine = build(fully_shard, torch_register if function == "torchs" else register_fsdp_forward_method)
    assert_same(train(mine, step), train(build(torch_fully_shard, torch_register), step))
    assert set(dtypes) == {torch.float32}
    with pytest.raises(ArithmeticError):
        mine.encode(x, fails=True)
    step(mine, 0)
    assert mine.project.weight is dict(mine.named_parameters())["project.weight"]


class Generator(nn.Module):
    """Forwards inside of another method, which then reads a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 4] to [B, 4]."""
        for _ in range(2):
            x = self(x) + self.layer.weight.sum()
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@distributed(world_size=2)
@pytest.mark.parametrize("compiles", [False, True])
def test_forwards_inside_of_a_registered_method(rank, world_size, compiles):
    plain = Generator()
    expected = plain.generate(torch.ones(2, 4))
    expected.sum().backward()
    for register in (torch_register, register_fsdp_forward_method):
        model = fully_shard(Generator())
        register(model, "generate")
        if compiles:
            model.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
        with torch.no_grad():
            assert torch.equal(model.generate(torch.ones(2, 4)), expected)
        for _ in range(2):
            model.generate(torch.ones(2, 4)).sum().backward()
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        for name, p in plain.named_parameters():  # each forward's gradients are reduced by themselves
            torch.testing.assert_close(grads[name], 2 * p.grad)
        assert model._fsdp_unit.depth == 0


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("asked", [False, True])
def test_a_program_with_its_root_logger_at_info(rank, world_size, asked):
    """As torchtitan's is: one rank tells of each graph."""
    root, ours = logging.getLogger(), logging.getLogger("compiled_fsdp")
    with (
        mock.patch.object(root, "level", logging.INFO),
        mock.patch.object(ours, "level", logging.INFO if asked else logging.NOTSET),
        logged(root.name) as said,
    ):
        root.manager._clear_cache()
        train(compiled(fully_shard(nn.Linear(4, 4))), lambda model, _: model(torch.ones(2, 4)).sum(), steps=1)
    root.manager._clear_cache()
    lines = [line for line in said if "graph: 2 parameters read" in line or "overlap efficiency" in line]
    assert len(lines) == (4 if rank == 0 or asked else 0), said


@distributed(world_size=1)
def test_fsdp2s_state(rank, world_size):
    """What torch's functions use of it is there. What is FSDP2's runtime is not, and the error names what is to be
    called."""
    model, other = shard(Transformer(), fully_shard), fully_shard(nn.Linear(2, 2))
    state = model._get_fsdp_state()
    assert state is fully_shard.state(model) is torch_fully_shard.state(model)
    assert fully_shard.state(model.embedding) is None
    assert state is not model.blocks[0]._get_fsdp_state()
    pair = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    fully_shard(list(pair))
    assert fully_shard.state(pair[0]) is fully_shard.state(pair[1])

    assert state._comm_ctx is not other._get_fsdp_state()._comm_ctx
    torch_share_comm_ctx([model, other])
    assert state._comm_ctx is other._get_fsdp_state()._comm_ctx
    theirs = torch_fully_shard(nn.Linear(2, 2))
    torch_share_comm_ctx([other, theirs])
    assert theirs._get_fsdp_state()._comm_ctx is state._comm_ctx
    assert torch.equal(theirs(torch.ones(1, 2)), theirs(torch.ones(1, 2)))

    model._set_unshard_async_op(True)
    for asked in (lambda: state._lazy_init(), lambda: state._fsdp_param_group.fsdp_params):
        with pytest.raises(AttributeError, match=r"compiled_fsdp.*(_lazy_init|fsdp_params).*unshard\(\)"):
            asked()
    with pytest.raises(AttributeError, match="unshard_async_op"):
        state._fsdp_param_group.unshard_async_op = True


@distributed(world_size=1)
def test_our_functions_on_modules_of_torchs(rank, world_size):
    """Where ours stand for torch's, some modules may still be torch's."""
    theirs, mine = torch_fully_shard(Encoder()), fully_shard(Encoder())
    register_fsdp_forward_method(theirs, "encode")
    assert torch.equal(theirs.encode(torch.ones(2, 8)), Encoder().encode(torch.ones(2, 8)))
    other = torch_fully_shard(nn.Linear(2, 2))
    share_comm_ctx([theirs, other])
    assert theirs._get_fsdp_state()._comm_ctx is other._get_fsdp_state()._comm_ctx
    share_comm_ctx([])
    with pytest.raises(ValueError, match="share_comm_ctx"):
        share_comm_ctx([mine, nn.Linear(2, 2)])
    assert fully_shard.state(theirs) is torch_fully_shard.state(theirs)


@distributed(world_size=2)
@pytest.mark.parametrize("way", ["eager", "compiled blocks", pytest.param("compiled_fsdp", marks=pytest.mark.more)])
@pytest.mark.filterwarnings("ignore")
def test_replicate_around_sharded_blocks(rank, world_size, way):
    """torch's composable `replicate` takes the parameters that no unit has, and leaves the units' alone."""
    from torch.distributed._composable.replicate import replicate

    def build(function) -> nn.Module:
        model = small(blocks=2)
        for block in model.blocks:
            function(block)
        return replicate(model)

    model, reference = build(fully_shard), build(torch_fully_shard)
    run = model
    if way == "compiled blocks":
        for block in model.blocks:
            block.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    elif way == "compiled_fsdp":
        run = compiled(model)
    assert_same(train(run), train(reference))
    assert not isinstance(model.head.weight, DTensor)
    assert isinstance(model.blocks[0].up.weight, DTensor)


def test_apis_of_torch_see_that_a_module_is_sharded():
    """`replicate` of the module itself is refused, as of FSDP2's; torch's own `fully_shard` on top of ours, too."""
    from torch.distributed._composable.replicate import replicate

    with fake_group(2):
        model = fully_shard(nn.Linear(4, 4))
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            replicate(model)
        with pytest.raises(AssertionError, match="already been applied"):
            torch_fully_shard(model)
        outer = nn.Sequential(model, nn.Linear(4, 4))
        fully_shard(outer)
        assert isinstance(outer[1].weight, DTensor)
