"""What sharding cannot see, and the first use can: a named error then."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from compiled_fsdp import fully_shard
from tests.harness import Transformer, assert_same, compiled, distributed, fsdp2, fsdp2_record, loss_of, shard, train
from tests.harness.models import small
from tests.harness.untouched import local, refused

pytestmark = pytest.mark.usefixtures("rank_0_of_4")


@pytest.mark.parametrize("materialized", ["nothing", "the embedding"])
@pytest.mark.parametrize("how", ["eager", "compiled", "suppress_errors"])
def test_still_on_meta_at_the_first_forward(how, materialized):
    with torch.device("meta"):
        model = Transformer()
    shard(model, fully_shard)
    if materialized == "the embedding":
        model.embedding.to_empty(device="cpu")
    with (
        torch._dynamo.config.patch(suppress_errors=how == "suppress_errors"),
        pytest.raises(RuntimeError, match="should be materialized from meta device") as error,
    ):
        loss_of(model if how == "eager" else compiled(model), 0, 0)
    for name in ("position.weight", "norm.weight", "head.weight"):
        assert f"'{name}'" in str(error.value)
    assert ("'embedding.weight'" in str(error.value)) == (materialized == "nothing")


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies(copying):
    """Of units. Modules inside can be copied, and not pickled: tests/sharding/test_copies.py."""
    model = shard(Transformer(), fully_shard)
    targets = [model, model.blocks[0]]
    if copying is not copy.copy:  # a shallow copy of something else does not reach into it
        targets += [model.blocks, compiled(model)]
    for target in targets:
        with refused(RuntimeError, "cannot be (deep-copied|copied|pickled)", model):
            copying(target)
    with refused(RuntimeError, "sharded Linear cannot be pickled.*state_dict", model):
        pickle.dumps(model.blocks[0].up)


@pytest.mark.parametrize("way", ["eager", "compiled_fsdp"])
def test_a_sparse_gradient(way):
    model = fully_shard(nn.Embedding(8, 4, sparse=True))
    run = compiled(model) if way == "compiled_fsdp" else model
    with pytest.raises(Exception, match=r"gradient of a sharded parameter is sparse.*sparse=False"):
        run(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    model = shard(Transformer(), fully_shard)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(Exception, match=r"torch\.export of a sharded model.*Export an unsharded copy"):
        torch.export.export(model, (tokens,), strict=strict)
    loss_of(model, 0, 0)  # the units are closed again, and the model runs on


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=1.0, foreach=False)])
def test_optimizer_built_before_sharding(make):
    model = Transformer()
    optimizer = make(model.parameters())
    shard(model, fully_shard)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [local(p).clone() for p in model.parameters()]
    with refused(
        ValueError, r"was built before fully_shard: it holds the unsharded '.+'.*[Bb]uild the optimizer after", model
    ):
        optimizer.step()
    assert all(torch.equal(local(p), was) for p, was in zip(model.parameters(), before, strict=True))
    make(model.parameters()).step()


def test_optimizer_that_stepped_before_sharding():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fully_shard(nn.Linear(4, 4))  # something else is sharded already
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    fully_shard(model[1])
    with pytest.raises(ValueError, match="SGD was built before fully_shard: it holds the unsharded 'weight'"):
        optimizer.step()


def test_sharded_weight_outside_of_forward():
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        F.linear(torch.ones(2, 4), model.weight)


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize("by_block", [False, True])
def test_torchs_fsdp2_given_to_the_backend(by_block, suppress):
    model = fsdp2(small(blocks=2))
    if by_block:
        for block in model.blocks:
            block.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    else:
        model = compiled(model)
    with (
        torch._dynamo.config.patch(suppress_errors=suppress),
        pytest.raises(NotImplementedError, match=r"was sharded by torch\.distributed\.fsdp\.fully_shard") as error,
    ):
        loss_of(model, 0, 0)
    assert "change the import" in str(error.value)
    x = torch.ones(4)  # its forward, which raised, left it in a state that says "forward": nothing to others
    assert torch.equal(compiled(nn.Hardtanh())(x), x)


@distributed(world_size=2)
def test_child_run_before_the_root(rank, world_size):
    model = shard(small(), fully_shard)
    x = torch.ones(2, 3, 16)
    assert torch.equal(model.blocks[0](x), small().blocks[0](x)), "a block alone"
    assert_same(train(model, steps=1), fsdp2_record(small(), steps=1))
