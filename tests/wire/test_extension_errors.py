"""All-gather extensions that cannot be used, or differ between ranks: an error with the parameter's name."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.testing._internal.two_tensor import TwoTensor

from compiled_fsdp import WirePolicy, fully_shard
from tests.harness import WAYS, compiled, distributed, loss_of, shard
from tests.harness.extensions import Padded, Split, wrap
from tests.harness.models import small

UP = r"'blocks\.1\.up\.weight'"


class OneHook(Split):
    fsdp_post_all_gather = property()  # type: ignore[assignment]  # hasattr: no


class TwoArguments(Split):
    def fsdp_pre_all_gather(self, mesh, module):
        raise AssertionError


class Uncut(Split):
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.new_zeros.default:
            raise NotImplementedError("not here")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    ("kind", "options", "error", "match"),
    [
        (OneHook, {}, ValueError, rf"{UP} of Transformer is a OneHook .*without fsdp_post_all_gather"),
        (TwoArguments, {}, ValueError, rf"{UP} of .*invalid fsdp_pre_all_gather\(mesh, module\)"),
        (
            Uncut,
            {},
            NotImplementedError,
            rf"{UP} of .*cannot be split into rows: NotImplementedError: not here.*ignored_p",
        ),
        (Split, {"reshard_after_forward": 2}, NotImplementedError, rf"{UP} of .*reshard_after_forward=2"),
        (Split, {"wire_policy": WirePolicy(gather="int8")}, ValueError, rf"{UP} of .*WirePolicy\(gather='int8'\)"),
    ],
)
@distributed(world_size=4)
def test_refused_when_sharding(rank, world_size, kind, options, error, match):
    model = wrap(small(blocks=2), kind, "1.up.weight")
    with pytest.raises(error, match=match):
        fully_shard(model, **options)
    assert type(model.blocks[1].up.weight.data) is kind  # nothing has changed
    fully_shard(model, ignored_params={model.blocks[1].up.weight}, **options)  # the way out of frozen ones


def odd(rank: int, what: str) -> type:
    """A tensor whose hooks go wrong, on rank 1 alone where that can be."""
    hurt = rank == 1

    class Odd(Padded):
        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            pieces, metadata = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
            if hurt and what == "raises before":
                raise ArithmeticError("told to")
            if hurt and what == "shapes":
                return [piece[:-1] for piece in pieces], metadata
            if hurt and what == "metadata":
                return pieces, (*metadata, "more")
            if hurt and what == "values":
                return pieces, torch.ones(3)
            if what == "values":
                return pieces, torch.zeros(3)
            return pieces[0] if what == "no tuple" else (pieces, metadata)

        def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
            if hurt and what == "raises after":
                raise ArithmeticError("told to")
            full, inner = super().fsdp_post_all_gather(outputs, ("split", 2), param_dtype)
            return full[:2] if what == "size" else full, inner

    return Odd


EVERYWHERE = {
    "raises before": r"fsdp_pre_all_gather of parameter 'blocks\.1\.up\.weight', a Odd, raised .*told to",
    "raises after": r"fsdp_post_all_gather of parameter 'blocks\.1\.up\.weight', a Odd, raised .*told to",
    "shapes": r"differ between ranks|returned a tensor of shape \(62, 16\), but the parameter's",
    "metadata": r"differ between ranks|ranks compile different regions.* blocks\.1\.up\.weight bfloat16",
    "values": r"differ between ranks",  # of the metadata's tensors: compared in eager code
    "no tuple": r"fsdp_pre_all_gather of parameter 'blocks\.1\.up\.weight', a Odd, must return",
    "size": r"parameter 'blocks\.1\.up\.weight', a Odd, returned a tensor of shape",
}


@pytest.mark.parametrize(
    ("what", "way"), [(what, way) for what in EVERYWHERE for way in WAYS if (what, way) != ("values", "compiled_fsdp")]
)
@distributed(world_size=2, reset=True)
def test_error_on_every_rank(rank, world_size, what, way):
    """And the ranks go on together: another model trains."""
    model = shard(wrap(small(blocks=2), odd(rank, what), "1.up.weight"), fully_shard)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=EVERYWHERE[what]) as caught:
        loss_of(WAYS[way](model), rank, 0)
    errors = [None] * world_size
    dist.all_gather_object(errors, str(caught.value))
    assert all("up.weight" in error for error in errors), errors


@distributed(world_size=2, reset=True)
def test_error_of_a_graph_without_other_gathers(rank, world_size):
    """The failing rank's graph has only a read of a frozen parameter that is full. The other rank hears of it."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))).requires_grad_(False)
    wrap(model, odd(rank, "raises before"), "1.weight", trains=False)
    fully_shard(model[0], reshard_after_forward=False)
    fully_shard(model)
    model[0].unshard()
    with pytest.raises((RuntimeError, ValueError), match=r"fsdp_pre_all_gather of parameter '1\.weight'"):
        compiled(model)(torch.ones(2, 8))


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=2)
def test_first_use_names_what_is_missing(rank, world_size, way):
    """Tensors that are made of others, without hooks: FSDP2 lets hooks come after sharding."""
    model = wrap(small(blocks=2), lambda weight: TwoTensor(weight, weight.clone()), "1.up.weight")
    shard(model, fully_shard)
    with pytest.raises(ValueError, match=rf"{UP}, a TwoTensor, is made of other tensors.*ignored_params"):
        loss_of(WAYS[way](model), rank, 0)


class Ragged(Padded):
    """Whose pieces are not padded."""

    fsdp_pre_all_gather = Split.fsdp_pre_all_gather  # type: ignore[assignment]


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=2)
def test_uneven_shards(rank, world_size, way):
    """61 rows are 31 and 30: each rank hears of it."""
    model = shard(wrap(small(blocks=2), Ragged, "head.weight"), fully_shard)
    with pytest.raises((ValueError, RuntimeError), match=r"'head\.weight', a Ragged, is unevenly sharded .*padded"):
        loss_of(WAYS[way](model), rank, 0)


@distributed(world_size=2)
def test_zeros_for_unused_parameters(rank, world_size):
    model = shard(wrap(small(blocks=2), Split, "1.up.weight"), fully_shard)
    with pytest.raises(NotImplementedError, match=rf"set_reduce_scatter_unused_params: {UP} has all-gather extensions"):
        model.blocks[1].set_reduce_scatter_unused_params(True)
