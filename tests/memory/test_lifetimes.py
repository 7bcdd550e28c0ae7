"""What stays alive: nothing of a model that is deleted, no first inputs, and nothing of a step."""

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.utils import counters

from compiled_fsdp import fully_shard
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import Unit
from tests.harness import Transformer, batch, compiled, distributed, forward_backward, loss_of, shard, variants
from tests.harness.models import Broken, Checkpointed, small

WAYS: dict[str, tuple[type[Transformer], Callable[[nn.Module], nn.Module]]] = {
    "eager": (Transformer, lambda model: model),
    "eager, checkpointed": (Checkpointed, lambda model: model),
    "whole": (Transformer, compiled),
    "checkpointed": (Checkpointed, compiled),
    "broken": (Broken, compiled),
    "inductor": (Transformer, lambda model: compiled(model, codegen="inductor")),  # C++ takes long
}


def life(way: str, rank: int, root_only: bool, *, trains: bool = True) -> list[weakref.ref]:
    """Build, train or evaluate, and drop a model. Returns references to what has to be gone: the model, parameters,
    their memory, gradients, optimizer state, inputs and outputs."""
    cls, wrap = WAYS[way]
    model = small(cls=cls)
    model = fully_shard(model) if root_only else shard(model, fully_shard)
    run = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    held: list[Any] = [model, run, optimizer, *model.modules(), *model.parameters()]
    for index in range(2):
        tokens, targets = batch(rank, index)
        with torch.set_grad_enabled(trains):
            logits = run(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        held += [tokens, logits, loss]
        if trains:
            loss.backward()
            optimizer.step()
            held += [param.grad for param in model.parameters()]
            optimizer.zero_grad()
    held += [param.to_local() for param in model.parameters()]
    held += [value for state in optimizer.state.values() for value in state.values()]
    assert all(thing is not None for thing in held)
    return [weakref.ref(thing) for thing in held]


def census() -> Counter[str]:
    """How many floating-point tensors, units, sharded parameters and models Python holds. What compiled code keeps
    beside them (graphs, fake tensors) is torch's to free, with the code."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.is_floating_point() and thing.numel() > 0:
            found["tensors"] += 1
        for kind in (Unit, ShardedParameter, torch.optim.Optimizer, Transformer):
            if issubclass(type(thing), kind):
                found[kind.__name__] += 1
    return found


def growth(first: Counter[str]) -> str:
    """What there is more of than there was first, and the tensors that there are. A thread of a process group lets go
    of the last collective's tensors when it comes to run again.
    """
    end = time.monotonic() + 20
    while not (now := census()) <= first and time.monotonic() < end:
        time.sleep(0.5)
    if now <= first:
        return ""
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    holders = [[type(holder).__name__ for holder in gc.get_referrers(t) if holder is not tensors] for t in tensors]
    return f"{now - first}: {[(list(t.shape), held) for t, held in zip(tensors, holders, strict=True)]}"


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("way", "root_only"),
    [
        *((way, False) for way in WAYS if way != "inductor"),
        ("eager", True),
        pytest.param("whole", True, marks=pytest.mark.more),
        pytest.param("inductor", False, marks=pytest.mark.more),
    ],
)
def test_a_deleted_model_is_gone(rank, world_size, way, root_only):
    """After training and after evaluation; and a second and third model leave no more behind than the first did."""
    counts = []
    for trains in (True, False, True) if way != "inductor" else (True, True):
        references = life(way, rank, root_only, trains=trains)
        gc.collect()
        left = [type(thing).__name__ for reference in references if (thing := reference()) is not None]
        assert not left, f"{len(left)} of {len(references)} are alive: {sorted(set(left))}"
        counts.append(census())
    found = [""] * world_size
    dist.all_gather_object(found, growth(counts[0]))
    if any(found):  # of what is kept once, a fourth model leaves no more
        before = census()
        life(way, rank, root_only)
        assert not growth(before), found
    assert counts[-1]["Unit"] == counts[-1]["ShardedParameter"] == counts[-1]["Transformer"] == 0


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(["eager", "whole", "broken"], "eager", "broken"))
def test_a_backward_after_its_model_is_gone(rank, world_size, way):
    """Its loss keeps what its gradients go to, as a plain model's does."""
    model_type, run = WAYS[way]
    grads = []
    for deletes in (False, True):
        model = shard(model_type(blocks=2), fully_shard)
        params = list(model.parameters())
        loss = loss_of(run(model), rank, 0)
        if deletes:
            del model
            gc.collect()
        loss.backward()
        grads.append([param.grad.full_tensor() for param in params])
    assert all(map(torch.equal, *grads))


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("another_lives", [True, False])
def test_models_one_after_the_other_share_their_code(rank, world_size, another_lives):
    """As plain models do. Or the eighth model of a process meets Dynamo's recompile limit and runs uncompiled, and the
    code of all that are gone stays."""
    other = fully_shard(nn.Linear(2, 2)) if another_lives else None
    counters.clear()
    for _ in range(3):
        life("whole", rank, root_only=False)
    assert counters["stats"]["unique_graphs"] == 1
    del other


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(["whole", "broken", "checkpointed"], "whole", "broken"))
def test_compiled_code_does_not_hold_the_first_inputs(rank, world_size, way):
    """While the model lives on. The first batch, its activations and outputs are as any other's."""
    cls, wrap = WAYS[way]
    model = shard(small(cls=cls), fully_shard)
    run = wrap(model)
    seen: list[weakref.ref] = []
    handle = model.norm.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(args[0])))
    if way == "whole":
        handle.remove()  # in a compiled hook there is no tensor to refer to
    for index in range(2):
        tokens, _ = batch(rank, index)
        logits = run(tokens)
        loss = logits.sum()
        seen += [weakref.ref(thing) for thing in (tokens, logits, loss)]
        loss.backward()
        model.zero_grad()
        del tokens, logits, loss
    gc.collect()
    assert len(seen) >= 6
    left = [i for i, reference in enumerate(seen) if reference() is not None]
    assert not left, f"{left} of {len(seen)}"
    run(batch(rank, 3)[0])  # and the code is still there


@pytest.mark.parametrize("way", ["broken", *(pytest.param(way, marks=pytest.mark.more) for way in ("eager", "whole"))])
@distributed(world_size=2)
def test_steps_leave_no_objects_behind(rank, world_size, way):
    """Of any type that Python's collector knows."""
    cls, wrap = WAYS[way]
    model = shard(small(blocks=2, cls=cls), fully_shard)
    run = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def objects_after(steps: int) -> Counter[str]:
        for index in range(steps):
            optimizer.zero_grad()
            forward_backward(run, index)
            optimizer.step()
        gc.collect()
        return Counter(f"{type(thing).__module__}.{type(thing).__name__}" for thing in gc.get_objects())

    objects_after(10)  # the first time more is left: caches, of this count as well
    before = objects_after(5)
    grown = objects_after(60) - before
    if torch.__version__ < "2.12":  # there DTensorSpecs stay, five a step
        grown = Counter({name: count for name, count in grown.items() if name.startswith("compiled_fsdp.")})
    assert grown.total() < 30, grown.most_common(5)


@pytest.mark.parametrize("way", ["eager", *(pytest.param(way, marks=pytest.mark.more) for way in ("whole", "broken"))])
@distributed(world_size=2)
def test_a_forward_without_a_backward_leaves_nothing(rank, world_size, way):
    """With gradients on: autograd's nodes save results of their own, which must not keep the nodes."""
    cls, wrap = WAYS[way]
    run = wrap(shard(cls(dim=16), fully_shard))  # its gates save their results

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    counts = []
    for step in range(4):
        run(batch(rank, step)[0])
        counts.append(tensors())
    assert not counts[1] < counts[2] < counts[3], counts  # models of other tests may go, or come to be learned
