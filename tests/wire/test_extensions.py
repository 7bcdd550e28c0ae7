"""FSDP2's all-gather extensions: what a parameter's hooks send, beside FSDP2, in eager code and in graphs."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import explain, fully_shard
from tests.harness import WAYS, compiled, distributed, loss_of, planned_ops, shard, variants, ways
from tests.harness.extensions import Padded, Split, Two, assert_all_equal, plain, train_locally, two, wrap
from tests.harness.models import small

KINDS = {"mesh alone": (Split, "up.weight", "down.weight"), "uneven": (Padded, "head.weight", "embedding.weight")}


def build(kind: str = "mesh alone", **options: bool) -> nn.Module:
    return wrap(small(blocks=2), *KINDS[kind], **options)


CASES = list(itertools.product(KINDS, WAYS, [False, True]))


@pytest.mark.parametrize(
    ("kind", "way", "keeps"),
    variants(CASES, *((kind, way, keeps) for kind, way, keeps in CASES if way == "eager" or not keeps)),
)
@distributed(world_size=2)
def test_equal_to_fsdp2(rank, world_size, kind, way, keeps):
    model = shard(build(kind), fully_shard, reshard_after_forward=not keeps)
    wrapped = [param for param in model.parameters() if type(param.to_local()) is KINDS[kind][0]]
    assert len(wrapped) == len(KINDS[kind]) * 2 - 2 if kind == "mesh alone" else 2
    theirs = train_locally(shard(build(kind), torch_fully_shard, reshard_after_forward=not keeps))
    assert_all_equal(train_locally(model, WAYS[way](model)), theirs)


@distributed(world_size=2)
def test_pieces_are_gathered_outside_of_autocast(rank, world_size):
    """Torch's on the CPU refuses to put tensors of float16 side by side."""
    model = wrap(nn.Linear(8, 8).half(), two, "weight")
    whole = plain(model.weight)
    dist.broadcast(whole, 0)
    with torch.no_grad():
        model.weight.a.copy_(whole)
        model.weight.b.copy_(whole)
    fully_shard(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.unshard()
    assert torch.equal(plain(model.weight), whole)


@distributed(world_size=2, reset=True)
def test_in_one_graph(rank, world_size):
    """Encode and decode are ops of the graph; tensors of one dtype share a collective, of more parameters too."""
    model = shard(build(), fully_shard)
    loss_of(compiled(model, fullgraph=True, bucket="module"), rank, 0).backward()
    graphs = explain(model).graphs
    assert len(graphs) == 2
    forward = graphs[0].planned
    # a block: what is float32, two pieces as bfloat16, two as bytes; and the root
    assert planned_ops(graphs[0])["gather"] == 7
    sent = [
        (re.findall(r"; dtype (\w+)", line) or ["float32"])[0]
        for line in forward.splitlines()
        if "launch.default(" in line and "'gather " in line
    ]
    assert sorted(sent) == ["bfloat16"] * 2 + ["float32"] * 3 + ["uint8"] * 2


@ways
@distributed(world_size=2)
def test_full_parameters_made_of_tensors(rank, world_size, way):
    """So are activations and gradients; the reduced gradient is a plain tensor, as FSDP2 has it."""
    model = shard(wrap(small(), two, "up.weight"), fully_shard)
    theirs = train_locally(shard(wrap(small(), two, "up.weight"), torch_fully_shard))
    assert_all_equal(train_locally(model, WAYS[way](model)), theirs)
    assert type(model.blocks[0].up.weight.to_local()) is Two
