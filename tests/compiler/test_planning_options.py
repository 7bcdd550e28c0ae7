"""What options make of a plan: buckets of a size or by pattern, hardware, overlap."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn as nn

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.compiler.user_buckets import PatternsDiffer
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.reporting.report import GraphReport
from tests.harness import compiled
from tests.harness.fake import fake_group


def tower(*sizes: int) -> nn.Module:
    """Square layers of these sizes; each is a unit."""
    return nn.Sequential(*(Square(size) for size in sizes))


class Square(nn.Linear):
    """A layer between activations of 512 that uses `size` of them."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(torch.tanh(super().forward(x[:, : self.in_features])), (0, 512 - self.out_features))


def reports_of(model: nn.Module, **options: Any) -> list[GraphReport]:
    """The graphs of a compiled step of a model whose layers are units, on one of two ranks."""
    with fake_group(2):
        for layer in model:
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(model, reshard_after_forward=True)
        compiled(model, verify="full", **options)(torch.ones(2, 512)).sum().backward()
        graphs = list(explain(model).graphs)
    assert [graph.phase for graph in graphs] == ["forward", "backward"]
    return graphs


def launched(graph: GraphReport, kind: str) -> list[list[str]]:
    """Parameter names by bucket, in the order of launches."""
    return [list(flight.names) for flight in graph.collectives if flight.bucket.kind == kind]


SIZES = (64, 128, 256, 512, 256, 128, 64, 64)  # weights of 16 kB to 1.05 MB


@pytest.mark.parametrize("megabytes", [0.3, pytest.param(1, marks=pytest.mark.more)])
def test_buckets_of_a_size(megabytes):
    """As many neighbours as fit; a parameter that is larger is alone."""
    forward, backward = reports_of(tower(*SIZES), bucket=megabytes)
    for graph, kind in ((forward, "gather"), (backward, "gather"), (backward, "reduce")):
        buckets = [flight.bucket for flight in graph.collectives if flight.bucket.kind == kind]
        size = {read.index: read.bytes for read in graph.reads}
        assert len(buckets) > 1
        assert any(len(bucket.reads) > 1 for bucket in buckets)
        assert any(len(bucket.reads) == 1 and bucket.bytes > megabytes * 1e6 for bucket in buckets)
        for bucket in buckets:
            assert bucket.bytes <= megabytes * 1e6 or len(bucket.reads) == 1, bucket
        for this, following in itertools.pairwise(buckets):
            assert this.bytes + size[following.reads[0]] > megabytes * 1e6, f"{this} has room for one of {following}"
    read = [index for flight in forward.collectives for index in flight.bucket.reads]
    assert sorted(read) == list(range(2 * len(SIZES)))


@pytest.mark.more
def test_a_size_that_holds_everything():
    forward, backward = reports_of(tower(*SIZES), bucket=25)
    assert (forward.count("gather"), backward.count("gather"), backward.count("reduce")) == (1, 1, 1)


def test_buckets_of_your_own():
    """By the first list that matches; what matches none is alone."""
    own = [["0.weight", "[12].*"], ["*.weight"]]
    forward, backward = reports_of(tower(64, 64, 64, 64, 64), bucket=own)
    expected = [
        {"0.weight", "1.weight", "1.bias", "2.weight", "2.bias"},
        {"3.weight", "4.weight"},
        *({f"{i}.bias"} for i in (0, 3, 4)),
    ]
    assert {launched(forward, "gather")[i][0][0] for i in (0, 1)} == {"0"}  # what is needed first
    found = launched(forward, "gather"), launched(backward, "reduce")
    for buckets in found:
        assert sorted(map(sorted, buckets)) == sorted(map(sorted, expected))
    again = {name for bucket in launched(backward, "gather") for name in bucket}
    assert again == {f"{i}.weight" for i in range(1, 5)}  # of a linear layer backward reads the weight
    assert sorted(["1.weight", "2.weight"]) in map(sorted, launched(backward, "gather"))


class Layer(nn.Linear):
    """Of torch's own Dynamo does not compile the forward alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class Layers(nn.Module):
    """Equal layers after graph breaks: each is compiled alone, and the compiled code is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


def run_layers(bucket: list[list[str]]) -> nn.Module:
    model = fully_shard(Layers())
    compiled(model, bucket=bucket)(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return model


@pytest.mark.parametrize(
    ("bucket", "other"),
    [
        ([["layers.0.*"], ["layers.1.weight"], ["layers.1.bias"]], "layers.1.bias"),
        ([["layers.0.*", "layers.1.*"]], "layers.2.weight"),  # what matches nothing is alone
        ([["layers.1.*"]], "layers.1.bias"),
    ],
)
def test_patterns_that_tell_equal_layers_apart(bucket, other):
    with (
        fake_group(2),
        pytest.raises(PatternsDiffer, match=r"option 'bucket'.*shares compiled code with.*equal buckets") as caught,
    ):
        run_layers(bucket)
    assert other.rsplit(".", 1)[0] in str(caught.value)


@pytest.mark.parametrize(
    "bucket",
    [[["layers.*"]], [["layers.0.*"], ["layers.1.*"], ["layers.2.*"]], [["*.bias"], ["*.weight"]]],
)
def test_patterns_that_divide_equal_layers_alike(bucket):
    with fake_group(2):
        graphs = explain(run_layers(bucket)).graphs
    assert [graph.phase for graph in graphs] == ["forward", "backward"]
    together = len(graphs[0].plan.launches) == 1
    assert together == (bucket[0][0] in ("layers.*", "layers.0.*"))


@pytest.mark.more
def test_hardware():
    """A name, or numbers of your own: what is planned for changes."""
    slow = dataclasses.replace(PROFILES["cpu"], latency=0.5)
    seconds = []
    for hardware in (PROFILES["h100"], "h100", "cpu", slow):
        forward, _ = reports_of(tower(64, 64), hardware=hardware)
        seconds.append(forward.simulation.seconds)
    assert seconds[0] == seconds[1] < seconds[2] < 0.5 < seconds[3]


@pytest.mark.more
def test_overlap():
    """Off, each gather is launched where it is waited for."""
    hidden = {}
    for overlap in (True, False):
        forward, _ = reports_of(tower(64, 64, 64, 64), bucket="module", overlap=overlap)
        hidden[overlap] = [flight.compute_between for flight in forward.collectives]
    assert sum(hidden[True]) > 0
    assert sum(hidden[False]) == 0
