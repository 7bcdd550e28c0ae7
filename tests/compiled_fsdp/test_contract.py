"""Small promises of FSDP2's that have no better place; docs/contract.md has them all."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from compiled_fsdp import explain, fully_shard, register_fsdp_forward_method
from tests.harness import (
    Transformer,
    assert_same,
    batch,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    shard,
    train,
)
from tests.harness.fake import fake_group
from tests.harness.models import small

WAYS = {"eager": lambda model: model, "compiled_fsdp": compiled}
ways = pytest.mark.parametrize("way", WAYS)


class Chunked(Transformer):
    """Forward ends before the head, which the loss calls for one half of the batch after the other."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@distributed(world_size=2)
@ways
def test_modules_of_a_unit_called_later(rank, world_size, way):
    """`fully_shard([norm, head])`, with the head called by the loss."""

    def step(run, model, index):
        tokens, targets = batch(rank, index)
        hidden = run(tokens)
        halves = zip(hidden.chunk(2), targets.chunk(2), strict=True)
        loss = sum(nn.functional.cross_entropy(model.head(h).flatten(0, 1), t.flatten()) for h, t in halves)
        loss.backward()
        return loss.detach()

    model, plain = small(blocks=2, cls=Chunked), small(blocks=2, cls=Chunked)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    run = WAYS[way](model)
    actual = step(run, model, 0)
    assert torch.equal(actual, step(plain, plain, 0))
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(expected.grad)
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2, msg=name)


@distributed(world_size=2)
@ways
def test_changing_reshard_after_forward(rank, world_size, way):
    """Of one unit, or of all inside: the next forward compiles again, once, and backward gathers what is not kept."""
    model = shard(small(blocks=2), fully_shard)
    run = compiled(model, bucket="module") if way == "compiled_fsdp" else WAYS[way](model)
    reference = fsdp2(small(blocks=2))
    gathers = []
    for change in (
        lambda m: None,
        lambda m: m.set_reshard_after_forward(True, recurse=False),
        lambda m: m.set_reshard_after_forward(False),
    ):
        change(model)
        change(reference)
        model.zero_grad()
        reference.zero_grad()
        before = len(explain(model).graphs)
        for _ in range(2):
            assert torch.equal(forward_backward(run, 0), forward_backward(reference, 0))
        if way == "compiled_fsdp":
            graphs = explain(model).graphs
            assert len(graphs) == before + 2
            gathers.append(graphs[-1].count("gather"))
        for param, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param.grad.full_tensor(), theirs.grad.full_tensor())
    assert gathers == ([2, 3, 0] if way == "compiled_fsdp" else [])


@distributed(world_size=2)
def test_unsharding_is_not_recursive(rank, world_size):
    model = shard(small(blocks=2), fully_shard)
    model.unshard()
    assert not isinstance(model.head.weight, DTensor)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    model.blocks[0].unshard()
    model.reshard()
    assert isinstance(model.head.weight, DTensor)
    assert not isinstance(model.blocks[0].up.weight, DTensor)


@distributed(world_size=2)
def test_a_compiled_forward_gathers_what_is_pending(rank, world_size):
    """`unshard(async_op=True)` that nobody has waited for."""
    model = shard(small(blocks=2), fully_shard)
    run = compiled(model)
    expected = forward_backward(run, 0)
    handle = model.unshard(async_op=True)
    assert torch.equal(forward_backward(run, 0), expected)
    handle.wait()


@distributed(world_size=2)
@ways
def test_forward_called_directly(rank, world_size, way):
    """It does not gather, unless it is registered as one of the methods that do."""
    model = fully_shard(small(blocks=2))
    tokens, _ = batch(rank, 0)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.forward(tokens)
    expected = model(tokens)
    register_fsdp_forward_method(model, "forward")
    assert torch.equal(model.forward(tokens), expected)
    assert torch.equal(WAYS[way](model)(tokens), expected)


@distributed(world_size=1)
@ways
def test_hooks_of_the_user(rank, world_size, way):
    """Pre-hooks and hooks from before sharding see full parameters; full ones are plain tensors."""
    seen = []

    def see(module, *_):
        seen.append(type(module.weight) is torch.Tensor)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_pre_hook(see)
    model[0].register_forward_hook(see)
    fully_shard(model[0])
    fully_shard(model)
    model[0].register_forward_pre_hook(see, prepend=False)
    WAYS[way](model)(torch.ones(2, 4)).sum().backward()
    assert seen == [True] * 3


@distributed(world_size=2)
def test_a_list_as_the_root(rank, world_size):
    """FSDP2 refuses it at the first forward; here each module may be called alone."""
    first, second = fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)])
    second(first(torch.ones(2, 4))).sum().backward()
    assert all(param.grad is not None for module in (first, second) for param in module.parameters())


@distributed(world_size=2)
def test_what_is_accepted_and_changes_nothing(rank, world_size):
    model = shard(small(blocks=2), fully_shard, offload_policy=OffloadPolicy())

    def step(model, index):
        model.set_is_last_backward(index == 1)
        loss = forward_backward(model, index)
        model.set_is_last_backward(True)
        return loss

    assert_same(train(model, step, steps=2), fsdp2_record(small(blocks=2), steps=2))


class Interrupted(Transformer):
    """Interrupted in the middle of a forward when told to."""

    told = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.told:
            raise KeyboardInterrupt
        return super().forward(tokens)


@distributed(world_size=2)
def test_resetting_after_an_exception(rank, world_size):
    """`reset_iter_state()`: nothing is full any more, neither what an interrupt left nor what was unsharded."""
    model = shard(Interrupted(), fully_shard)
    expected = forward_backward(model, 0)
    model.blocks[0].unshard()
    model.told = True
    with pytest.raises(KeyboardInterrupt):
        forward_backward(model, 1)
    model.told = False
    assert not isinstance(model.head.weight, DTensor), "an interrupt reaches no hook, so there was nothing to reset"
    model.reset_iter_state()
    assert isinstance(model.head.weight, DTensor)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    model.zero_grad()
    assert torch.equal(forward_backward(model, 0), expected)


class TwoOutputs(nn.Module):
    """The sum of one head's results is a loss; the other head's are looked at."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


@distributed(world_size=2)
def test_gradients_of_an_output_that_is_not_used(rank, world_size):
    """None as FSDP2's, but zeros where one compiled graph has both outputs, as plain models have them under torch.compile."""

    def unused_gradients(model, run):
        run(torch.ones(2, 8) + rank)[0].sum().backward()
        assert model.used.weight.grad is not None
        return [param.grad for param in model.unused.parameters()]

    theirs, plain = torch.distributed.fsdp.fully_shard(TwoOutputs()), TwoOutputs()
    eager, sharded = fully_shard(TwoOutputs()), fully_shard(TwoOutputs())
    assert unused_gradients(theirs, theirs) == unused_gradients(eager, eager) == [None, None]
    for model, run in ((plain, torch.compile(plain, backend="aot_eager")), (sharded, compiled(sharded))):
        assert all(grad is not None and not grad.any() for grad in unused_gradients(model, run))


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
