"""Activation checkpointing of every kind, inside units, around them, and where the root alone is sharded."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compiled_fsdp import explain, fully_shard
from tests.harness import Transformer, assert_same, compiled, ddp, distributed, fsdp2_record, shard, train, variants
from tests.harness.models import VOCABULARY, Block, small, without_attention
from tests.harness.ours import COUNTED, by_unit
from tests.harness.reference import Sharding


def save_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """What is dear to compute is kept, the rest computed again."""
    dear = (torch.ops.aten.mm.default, torch.ops.aten.sigmoid.default)
    return CheckpointPolicy.MUST_SAVE if op in dear else CheckpointPolicy.PREFER_RECOMPUTE


def save_everything(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def recompute_everything(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": lambda function, x: function(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_products)
    ),
    "selective, all saved": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_everything)
    ),
}
KINDS_TESTED = ("reentrant", "not reentrant", "selective")


class Halves(Block):
    """A block whose two halves are checkpointed each."""

    kind = "plain"

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm1(x))

    def think(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KINDS[self.kind](self.think, KINDS[self.kind](self.attend, x))


class Model(Transformer):
    """The transformer, checkpointed "inside" its blocks (both halves), "around" them, or around "all" of them at
    once."""

    def __init__(self, kind: str, where: str, *, breaks: bool = False, seed: int = 0) -> None:
        super().__init__(dim=16, seed=seed)
        self.kind, self.where, self.breaks = kind, where, breaks
        if where != "inside":
            without_attention(self)
            return
        for block in self.blocks:
            block.__class__, block.kind = Halves, kind  # the parameters stay what they are

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.breaks:
                torch._dynamo.graph_break()
            x = KINDS[self.kind](block, x) if self.where == "around" else block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = KINDS[self.kind](self.layers, x) if self.where == "all" else self.layers(x)
        return self.head(self.norm(x))


def collectives(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Gathers and reductions of each compiled graph, by phase."""
    return {graph.phase: (graph.count("gather"), graph.count("reduce")) for graph in explain(model).graphs}


class Pair(nn.Module):
    """Two layers in one checkpoint, of which ``policy`` says what is kept."""

    def __init__(self, policy: Callable[..., CheckpointPolicy]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.contexts = partial(create_selective_checkpoint_contexts, policy)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).sin()).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False, context_fn=self.contexts)


@distributed(world_size=2)
def test_another_policy_in_the_same_process(rank, world_size):
    """Equal parameters, other backward: the first model's plan, which gathers after reductions, is none for the
    second."""
    gradients, orders = [], []
    for policy in (save_everything, recompute_everything):
        model = Pair(policy)
        for layer in (model.first, model.second):
            fully_shard(layer)
        fully_shard(model)
        compiled(model, bucket="parameter", overlap=False)(torch.full((2, 4), 0.5, requires_grad=True)).sum().backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        (backward,) = [graph for graph in explain(model).graphs if graph.phase == "backward"]
        orders.append([f"{bucket.kind} {bucket.reads[0]}" for bucket in backward.plan.launches])
    assert orders[0] == ["gather 1", "reduce 1", "gather 0", "reduce 0"]
    assert orders[1] == ["gather 0", "gather 1", "reduce 1", "reduce 0"]
    assert all(map(torch.equal, *gradients))


def assert_few_collectives(model: nn.Module) -> None:
    """Three units, of which backward gathers the two blocks again."""
    found = collectives(model)
    assert found.keys() == {"forward", "backward"}, found
    assert found["forward"] == (3, 0)
    assert found["backward"][0] <= 2
    assert found["backward"][1] == 3


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("way", "where"),
    [
        ("eager", "inside"),
        ("eager", "around"),
        pytest.param("compiled_fsdp", "around", marks=pytest.mark.more),
        pytest.param("by unit", "inside", marks=pytest.mark.more),
    ],
)
def test_a_policy_that_saves_everything(rank, world_size, way, where):
    """Gathers among what is kept. Around units FSDP2 itself fails: its gathers are not equally many the second time."""
    model = shard(Model("selective, all saved", where), fully_shard)
    assert_same(train(COUNTED[way](model), steps=2), train(ddp(Model("plain", where)), steps=2))


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("way", "kind", "where"),
    [
        *(("eager", kind, "around") for kind in KINDS_TESTED),
        ("eager", "reentrant", "inside"),
        ("eager", "selective", "inside"),
        pytest.param("compiled_fsdp", "reentrant", "around", marks=pytest.mark.more),
        ("compiled_fsdp", "not reentrant", "around"),
        ("by unit", "selective", "around"),
        pytest.param("by unit", "selective", "inside", marks=pytest.mark.more),
    ],
)
def test_checkpointed_units(rank, world_size, way, kind, where):
    model = shard(Model(kind, where), fully_shard)
    assert_same(train(COUNTED[way](model), steps=2), fsdp2_record(Model(kind, where), steps=2))
    if way == "by unit":
        assert_few_collectives(model)


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("way", "kind"),
    [("eager", "reentrant"), ("eager", "not reentrant"), ("eager", "selective"), ("compiled_fsdp", "not reentrant")],
)
def test_several_units_in_one_checkpoint(rank, world_size, way, kind):
    """Units are run again inside of another one's recomputation."""
    model = shard(Model(kind, "all"), fully_shard)
    assert_same(train(COUNTED[way](model), steps=2), fsdp2_record(Model(kind, "all"), steps=2))


ORDERS = ("fully_shard(wrapper(block))", "wrapper(fully_shard(block))", "inside")


def wrapped(function: Sharding, impl: CheckpointImpl, order: str) -> nn.Module:
    """`checkpoint_wrapper` around each block before it is sharded, around each sharded block, or in it."""
    model = Transformer(dim=16) if order == "inside" else small(blocks=2)
    for index, block in enumerate(model.blocks):
        if order == "fully_shard(wrapper(block))":
            model.blocks[index] = function(checkpoint_wrapper(block, impl))
        elif order == "wrapper(fully_shard(block))":
            model.blocks[index] = checkpoint_wrapper(function(block), impl)
        else:
            block.attention = checkpoint_wrapper(block.attention, impl)
            function(block)
    function(model)
    return model


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("order", "way", "impl"),
    [
        *((order, "eager", impl) for order in ORDERS for impl in CheckpointImpl),
        pytest.param(ORDERS[0], "by unit", CheckpointImpl.NO_REENTRANT, marks=pytest.mark.more),
        (ORDERS[1], "by unit", CheckpointImpl.NO_REENTRANT),
    ],
)
def test_checkpoint_wrapper(rank, world_size, order, way, impl):
    model = wrapped(fully_shard, impl, order)
    expected = train(wrapped(torch_fully_shard, impl, order), steps=2)
    assert_same(train(COUNTED[way](model), steps=2), expected)
    if way == "by unit":
        assert_few_collectives(model)


@distributed(world_size=2)
def test_composable_checkpoint(rank, world_size):
    """The one that FSDP2's own tests have beside the others. Uncompiled: torch does not compile it."""

    def build(function: Sharding) -> nn.Module:
        model = small(blocks=2)
        for block in model.blocks:
            composable_checkpoint(block)
        return shard(model, function)

    assert_same(train(build(fully_shard), steps=2), train(build(torch_fully_shard), steps=2))


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_checkpointing_and_resharding(rank, world_size, reshard_after_forward):
    """Kept parameters are not gathered again because what they are used for is computed again."""
    options = {"reshard_after_forward": reshard_after_forward}
    model = shard(Model("not reentrant", "around"), fully_shard, **options)
    assert_same(train(by_unit(model), steps=2), fsdp2_record(Model("not reentrant", "around"), **options, steps=2))
    found = collectives(model)
    assert found["forward"] == (3, 0)
    assert found["backward"] == ((3 if reshard_after_forward else 0), 3)


class Tied(nn.Module):
    """One layer in two checkpoints."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.layer = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, VOCABULARY)
        self.kind = kind

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        run = KINDS[self.kind]
        return self.head(run(self.layer, torch.tanh(run(self.layer, self.embedding(tokens)))))


@distributed(world_size=2)
@pytest.mark.parametrize("way", variants(["eager", "compiled_fsdp"], "eager"))  # it is one unit
@pytest.mark.parametrize("kind", KINDS_TESTED)
def test_a_layer_in_two_checkpoints(rank, world_size, way, kind):
    """What the first one gathers in forward, the second one's recomputation has to gather itself."""
    assert_same(
        train(COUNTED[way](fully_shard(Tied(kind))), steps=2), train(torch_fully_shard(Tied(kind)), steps=2), rtol=1e-6
    )


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("graph", "kind", "where"),
    [
        *(("eager", kind, "around") for kind in KINDS_TESTED),
        ("eager", "not reentrant", "inside"),
        ("eager", "selective", "inside"),
        pytest.param("whole", "reentrant", "around", marks=pytest.mark.more),
        pytest.param("by unit", "selective", "around", marks=pytest.mark.more),
        pytest.param("broken", "not reentrant", "around", marks=pytest.mark.more),
    ],
)
def test_root_alone(rank, world_size, graph, kind, where):
    """Recomputation runs while no forward of the unit does."""
    breaks = graph == "broken"
    model = fully_shard(Model(kind, where, breaks=breaks))
    run = model if graph == "eager" else by_unit(model) if graph == "by unit" else compiled(model)
    assert_same(train(run, steps=2), train(torch_fully_shard(Model(kind, where)), steps=2))
    if graph == "by unit":
        assert collectives(model)["forward"] == (3, 0)
        assert collectives(model)["backward"][1] == 3
    if graph == "broken":
        assert explain(model).graph_breaks


class Attending(nn.Module):
    """Self-attention of torch's own, whose forward reads its four parameters several times."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class AttentionModel(nn.Module):
    """Two checkpointed layers of it."""

    def __init__(self, kind: str, *, breaks: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, 16)
            self.blocks = nn.ModuleList([Attending(), Attending()])
            self.head = nn.Linear(16, VOCABULARY)
        self.kind, self.breaks = kind, breaks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.breaks:
                torch._dynamo.graph_break()
            x = KINDS[self.kind](block, x)
        return self.head(x)


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("graph", "kind", "root_only"),
    [
        *(("eager", kind, True) for kind in KINDS_TESTED),
        ("eager", "selective", False),
        pytest.param("whole", "not reentrant", True, marks=pytest.mark.more),
        pytest.param("whole", "selective", False, marks=pytest.mark.more),
        pytest.param("broken", "reentrant", False, marks=pytest.mark.more),
        ("broken", "selective", True),
    ],
)
def test_multihead_attention(rank, world_size, graph, kind, root_only):
    """Recomputation must gather what forward gathered, and save as many tensors."""

    def build(function: Sharding) -> nn.Module:
        model = AttentionModel(kind, breaks=graph == "broken")
        return function(model) if root_only else shard(model, function)

    model = build(fully_shard)
    assert_same(
        train(model if graph == "eager" else compiled(model), steps=2), train(build(torch_fully_shard), steps=2)
    )


class Dropping(nn.Module):
    """Its output is linear in its only parameter: then <gradient, parameter> is the output, if backward uses the masks
    of forward."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(16, 64, bias=False)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(nn.functional.dropout(x, 0.5) @ self.layer.weight.t(), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KINDS["not reentrant"](self.inner, x).sum()


@distributed(world_size=2)
@pytest.mark.parametrize("codegen", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_dropout_in_a_checkpoint(rank, world_size, codegen):
    """Recomputed masks are forward's."""
    model = fully_shard(Dropping())
    run = compiled(model, codegen=codegen) if codegen else model
    torch.manual_seed(7)  # the same masks on both ranks, so that the average is each rank's own
    x = torch.ones(3, 16, requires_grad=True)
    for _ in range(2):
        model.zero_grad()
        out = run(x)
        out.backward()
        product = (model.layer.weight.grad.full_tensor() * model.layer.weight.full_tensor()).sum()
        torch.testing.assert_close(product, out.detach())
        assert out != 0


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Checkpoints(nn.Sequential):
    """Its layers are compiled alone, and checkpointed uncompiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


SWITCHES: dict[str, Callable[[nn.Module, int], object]] = {
    "nothing": lambda model, step: None,
    "kept unsharded": lambda model, step: model.set_reshard_after_backward(step == 3),
    "unshard()": lambda model, step: model.unshard() if step % 2 else None,
    "unshard() of layers": lambda model, step: [
        m.unshard() for m in model.modules() if hasattr(m, "unshard") and step % 2
    ],
    "unused parameters": lambda model, step: model.set_reduce_scatter_unused_params(True),
    "accumulation": lambda model, step: model.set_requires_gradient_sync(step % 2 == 1),
}


@distributed(world_size=2)
@pytest.mark.parametrize("units", variants([False, True], True))
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)])
@pytest.mark.parametrize("switch", SWITCHES)
def test_layers_compiled_alone(rank, world_size, switch, mesh, units):
    """What is saved the second time is taken by its order. In a group of one a shard and its gate look alike. In the
    third step one rank compiles anew, alone, and Dynamo's looks at a module's parameters must gather none."""
    found = []
    for sharded in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = Checkpoints(Residual(), Residual())
        options = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards"))}
        for layer in model if units else ():
            sharded(layer, **options)
        sharded(model, **options)
        for layer in model if sharded is fully_shard else ():
            layer.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
        seen = []
        for step in range(4):
            if sharded is fully_shard or switch != "unused parameters":
                SWITCHES[switch](model, step)
            x = torch.full((1 if (rank, step) == (0, 2) else 3, 8), 0.1 + rank + step, requires_grad=True)
            loss = model(x).square().mean()
            if sharded is fully_shard and units:
                assert all(isinstance(param, DTensor) for param in model.parameters()), "sharded again"
            loss.backward()
            seen.append(x.grad)
        found.append([*seen, *(param.grad.full_tensor() for param in model.parameters())])
    assert all(map(torch.equal, *found))


@distributed(world_size=2)
def test_layers_compiled_alone_with_shards_in_host_memory(rank, world_size):
    found = []
    for sharded in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = sharded(Checkpoints(Residual(), Residual()), offload_policy=CPUOffloadPolicy(pin_memory=False))
        for layer in model if sharded is fully_shard else ():
            layer.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
        x = torch.full((3, 8), 0.1 + rank, requires_grad=True)
        model(x).square().mean().backward()
        found.append([x.grad, *(param.grad.full_tensor() for param in model.parameters())])
    assert all(map(torch.equal, *found))
