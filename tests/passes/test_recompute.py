"""What backward computes again under a memory budget."""

import functools
import itertools
import math
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.passes import ways_to_cut
from compiled_fsdp.passes.min_cut import Item, cheapest
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.passes.recompute import Choices
from tests.harness import batch, compiled, shard
from tests.harness.fake import fake_group
from tests.harness.models import Transformer, small
from tests.passes.random_cases import cases

AGAIN, SAVED = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


# ---- one group -------------------------------------------------------------------------------------------------------
@st.composite
def groups(draw):
    """Up to six results, each of which can be saved or computed again."""
    items = []
    for i in range(draw(st.integers(1, 6))):
        size, seconds = draw(st.sampled_from([(1, 0), (3, 0), (1, 1), (4, 2), (2, None), (None, 0), (None, 3)]))
        reads = draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else ()
        items.append(Item(tuple(sorted(reads)), size, seconds, draw(st.booleans()), draw(st.sampled_from([0, 0, 1]))))
    return tuple(items)


def cost_of(items, again, saved, price):
    """The cost of a choice; None if something is missing."""
    for i, item in enumerate(items):
        there = i in again or i in saved
        if (item.needed or item.is_again) and not there:
            return None
        if item.is_again and i not in again:
            return None
        if i in again and (item.seconds is None and not item.is_again):
            return None
        if i in saved and item.bytes is None:
            return None
        if i in again and not all(read in again or read in saved for read in item.reads):
            return None
    total = sum(0 if items[i].is_again else items[i].seconds for i in again)
    return total + sum(items[i].bytes * (price + 2) for i in saved)


@cases(60)
@given(groups(), st.integers(0, 4))
def test_no_choice_costs_less(items, price):
    """Beside all choices there are."""
    again, saved = cheapest(items, float(price), 1.0)
    assert not again & saved
    costs = []
    for choice in itertools.product(("", "again", "saved"), repeat=len(items)):
        sets = [{i for i, made in enumerate(choice) if made == word} for word in ("again", "saved")]
        costs.append(cost_of(items, *sets, price))
    assert cost_of(items, again, saved, price) == min(cost for cost in costs if cost is not None)


def test_a_higher_price_saves_less():
    """A product takes 10 s, and its result 1 byte. What is computed from that takes 4 bytes and no time."""
    items = (Item((), 1, 10.0, True, False), Item((0,), 4, 0.0, True, False))
    assert cheapest(items, 1.0, 0.0) == ({1}, {0})
    assert cheapest(items, 11.0, 0.0) == ({0, 1}, set())


# ---- a model ---------------------------------------------------------------------------------------------------------
@contextmanager
def choices():
    """A list of the choices that compiles consider."""
    made = []

    def make(*args):
        made.append(Choices(*args))
        return made[-1]

    with mock.patch.object(ways_to_cut, "Choices", make):
        yield made


@functools.cache  # several tests look at the same choices
def planned(share=None):
    """The graphs of a model of four blocks, of which activations are most of the memory, and the choices."""
    budget = {} if share is None else {"memory_budget": int(share * peak_of(planned()[0]))}
    with fake_group(4), choices() as made:
        model = shard(small(dim=32, blocks=4), fully_shard)
        compiled(model, **budget)(batch(0, 0, size=64)[0]).sum().backward()
        return explain(model).graphs, made


class Uneven(nn.Module):
    """Layers in two halves: the first one ends with a small product, the second one with a large one."""

    def __init__(self, layers, checkpoints):
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(64, 512, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(512, 64, bias=False) for _ in range(layers))
        self.head = nn.Linear(64, 64, bias=False)
        self.checkpoints = checkpoints

    def forward(self, x):
        def layer(x, small, up, down):
            x = x + small(torch.tanh(x))
            return x + down(torch.tanh(up(x)))

        for each in zip(self.small, self.up, self.down, strict=True):
            x = checkpoint(layer, x, *each, use_reentrant=False) if self.checkpoints else layer(x, *each)
        return self.head(x)


class Skips(nn.Module):
    """Layers whose results are all used again in the end, so that nowhere all of forward passes through one."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x).exp().sin())
            kept.append(x)
        for layer, skip in zip(self.up, reversed(kept), strict=True):
            x = torch.tanh(layer(x) * skip)
        return x


def peak_of(graphs):
    return max(graph.simulation.peak for graph in graphs)


def compute_of(graphs):
    """Seconds of compute alone."""
    return sum(graph.tasks.seconds_before[-1] for graph in graphs)


def test_less_memory_takes_more_compute():
    """Each budget is kept. Without need nothing is chosen."""
    graphs, made = planned()
    assert not made
    seconds = [compute_of(graphs)]
    for share in (0.75, 0.55):
        less, made = planned(share)
        assert made
        assert peak_of(less) <= share * peak_of(graphs)
        seconds.append(compute_of(less))
    assert seconds == sorted(set(seconds))


def test_no_more_is_computed_again_than_by_checkpoints_of_layers():
    """In the same memory: the result that is saved is a layer's, because then its largest product runs once."""
    x, seconds, budget = torch.randn(2048, 64), [], {}
    for checkpoints in (True, False):
        with fake_group(4):
            model = fully_shard(Uneven(8, checkpoints))
            compiled(model, **budget)(x).sum().backward()
            graphs = explain(model).graphs
        budget = {"memory_budget": peak_of(graphs)}
        seconds.append(compute_of(graphs))
    assert seconds[1] <= seconds[0]


def test_the_bound_grows_as_there_is_less_room():
    """With room for everything, library kernels run once. With none some run twice, or what they made is copied."""
    graphs, made = planned(0.55)
    found = functools.partial(made[0].least_seconds, copied=0.0, highest_price=math.inf)
    bounds = [found(room) for room in (1e12, 1e5, 1e4, 0.0)]
    assert bounds == sorted(bounds)
    assert bounds[-1] > 1.01 * bounds[0]
    assert found(0.0, copied=1e15) == pytest.approx(bounds[0], rel=1e-3)
    shown = next(graph.for_backward for graph in graphs if graph.for_backward is not None)
    assert bounds[0] <= shown.bound <= sum(graph.simulation.seconds for graph in graphs)


def test_a_model_that_nothing_divides():
    """Skip connections over all of its middle."""
    x, peaks = torch.randn(2048, 64), []
    for share in (None, 0.9):
        budget = {} if share is None else {"memory_budget": int(share * peaks[0])}
        with fake_group(4):
            model = fully_shard(Skips())
            compiled(model, **budget)(x).sum().backward()
            peaks.append(peak_of(explain(model).graphs))
    assert peaks[1] <= 0.9 * peaks[0]


def test_the_first_layers_compute_again_before_the_last_ones():
    """In steps of a block. The residual stream between the blocks is saved, at all of its places or at some of them."""
    _, (made, *_) = planned(0.75)
    blocks = made._segments.items
    assert len(blocks) == 6  # with the embedding and the head
    for step in range(6):
        names = {node.name for block in blocks[:step] for node in block}
        assert made.policies(step).keys() <= names
    ends = [block[-1].name for block in blocks[:-1]]
    assert all(made.policies(6)[end] is SAVED for end in ends)
    assert all(SAVED in [made.policies(step)[end] for end in ends] for step in range(6, len(made), 6))


@pytest.mark.parametrize("vocabulary", [61, 4096])
def test_a_large_parameter_is_not_gathered_to_compute_a_smaller_result_again(vocabulary):
    """Backward does not read the embedding's weight: 8 kB or 0.5 MB, for a result of 0.1 MB."""
    with fake_group(4), choices() as made:
        run = compiled(shard(Transformer(32, 1, vocabulary=vocabulary), fully_shard), memory_budget=10_000)
        with pytest.raises(OverBudget):
            run(batch(0, 0, size=64)[0])
    segments = made[0]._segments
    (embedding,) = (node for nodes in segments.items for node in nodes if node.name == "embedding")
    assert (segments._seconds(embedding) is None) == (vocabulary == 4096)


@pytest.mark.more
def test_the_same_choice_each_time():
    """The numbers of a cut are whole, so that ranks choose alike."""
    first, again = (made[0] for _, made in (planned(0.75), planned.__wrapped__(0.75)))
    assert [first.policies(step) for step in range(len(first))] == [again.policies(step) for step in range(len(again))]
