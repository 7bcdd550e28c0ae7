"""Steps under FakeTensorMode, as scripts take one that estimate memory or time before they train: they touch nothing
real, and one rank may take them alone."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor

from compiled_fsdp import WirePolicy, compiled_autograd, count_communication, fully_shard
from compiled_fsdp.reporting.compile_log import COMPILE_LOG
from compiled_fsdp.runtime.context import RUNTIME
from tests.harness import assert_same, compiled, distributed, fsdp2_record, loss_of, shard, train, variants
from tests.harness.extensions import Split
from tests.harness.models import Checkpointed, broken, small, without_attention

Run = Callable[[nn.Module], torch.Tensor]


def compile_each_block(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
    return model


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="compiled_fsdp", fullgraph=True)
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "compiled": compiled,
    "inductor": lambda model: torch.compile(model, backend="compiled_fsdp", fullgraph=True),
    "compiled in place": compile_in_place,
    "compiled blocks": compile_each_block,
}


def step(run: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run(torch.zeros(4, 8, dtype=torch.int64)).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def two_steps(model: nn.Module, way: Callable[[nn.Module], nn.Module] = WAYS["eager"]) -> None:
    run, optimizer = way(model), torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(run, optimizer)


@contextlib.contextmanager
def fake(**options: Any) -> Iterator[FakeTensorMode]:
    """A mode whose tensors are all gone afterwards, with the graphs compiled before, and nothing that is in flight."""
    gc.collect()
    graphs, counts = list(COMPILE_LOG.graphs), RUNTIME.prefetcher.counts.copy()
    with count_communication() as volume, FakeTensorMode(**options) as mode:
        yield mode
    gc.collect()
    left = [t for t in gc.get_objects() if isinstance(t, FakeTensor) and t.fake_mode is mode]
    assert not left, f"{len(left)} tensors"
    assert RUNTIME.idle
    assert not volume.by_kind
    assert graphs == list(COMPILE_LOG.graphs)
    assert counts == RUNTIME.prefetcher.counts


def build() -> nn.Module:
    return small(blocks=2)


@distributed(world_size=2)
@pytest.mark.parametrize("make", variants([build, broken], build))
def test_one_rank_takes_fake_steps_alone_and_all_train_as_if_it_had_not(rank, world_size, make):
    """By every way to run a model, and then for real by most of them."""
    before = RUNTIME.prefetcher.counts.copy()
    if rank == 0:
        for way in WAYS.values():
            for loose in (False, True):
                with fake(allow_non_fake_inputs=loose):
                    if not (make is broken and way in (WAYS["inductor"], WAYS["compiled in place"])):
                        two_steps(shard(make(), fully_shard), way)
        if make is build:
            with fake(), compiled_autograd(codegen="aot_eager"):
                two_steps(shard(build(), fully_shard), compiled)
    for way in ("compiled", "eager", "compiled blocks"):
        assert_same(train(WAYS[way](shard(make(), fully_shard))), fsdp2_record(make()))
    counts = [None] * world_size
    dist.all_gather_object(counts, RUNTIME.prefetcher.counts - before)
    assert counts[0] == counts[1]


def accumulates(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for last in (False, True, False, True):
        model.set_requires_gradient_sync(last)
        model(torch.zeros(4, 8, dtype=torch.int64)).float().mean().backward()
        parameters = [parameter for unit in model._fsdp_unit.tree_units() for parameter in unit.parameters]
        assert all(parameter.grads.waits is not last for parameter in parameters)
        assert all((parameter.grad is not None) is last for parameter in model.parameters())
        if last:
            optimizer.step()
            optimizer.zero_grad()


def accumulates_over_replicas(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for last in (False, True):
        model.set_requires_all_reduce(last)
        model(torch.zeros(4, 8, dtype=torch.int64)).float().mean().backward()
        assert all((parameter.grad is not None) is last for parameter in model.parameters())
    optimizer.step()


def unshards(model: nn.Module) -> None:
    model.unshard(async_op=True).wait()
    assert isinstance(model.head.weight, FakeTensor)
    model(torch.zeros(4, 8, dtype=torch.int64)).float().mean().backward()
    assert isinstance(model.head.weight.grad, DTensor)
    model.set_reshard_after_backward(False)
    two_steps(model)
    model.reshard()


def moves(model: nn.Module) -> None:
    """A fake parameter has no address, and that it was replaced is seen all the same."""
    two_steps(model)
    model.to(torch.float64)
    two_steps(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
            assert name
    two_steps(model)
    model.load_state_dict(model.state_dict())
    two_steps(model)


def trains(model: nn.Module) -> None:
    two_steps(model)
    model(torch.zeros(4, 8, dtype=torch.int64)).float().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.dtype == parameter.dtype
        assert isinstance(parameter.grad.to_local(), FakeTensor)
    with torch.no_grad():
        model(torch.zeros(4, 8, dtype=torch.int64))


def with_extensions() -> nn.Module:
    model = build()
    for block in model.blocks:
        block.up.weight = nn.Parameter(Split(block.up.weight.data))
    return model


def tied() -> nn.Module:
    model = build()
    model.head.weight = model.embedding.weight
    return model


FEATURES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[[nn.Module], None]]] = {
    "plain": (build, {}, trains),
    "the default mesh": (build, {"mesh": None}, trains),
    "one unit": (build, {"auto_wrap_policy": lambda *_, **__: False}, trains),
    "tied parameters": (tied, {}, trains),
    "checkpoints": (lambda: without_attention(Checkpointed(dim=16)), {}, trains),
    "kept from forward to backward": (build, {"reshard_after_forward": False}, trains),
    "mixed precision": (build, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, trains),
    "host memory": (build, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, trains),
    "equal states": (build, {"sync_module_states": True}, trains),
    "codecs": (build, {"wire_policy": WirePolicy(gather="int8", reduce="int8", error_feedback=True)}, trains),
    "replicas": (build, {"mesh": (2, 1)}, trains),
    "gradients that wait for the replicas": (build, {"mesh": (2, 1)}, accumulates_over_replicas),
    "gradients that wait": (build, {}, accumulates),
    "unsharded": (build, {}, unshards),
    "moved": (build, {}, moves),
    "all-gather extensions": (with_extensions, {}, two_steps),
}


@pytest.mark.more
@distributed(world_size=2)
def test_one_rank_alone_tries_what_a_model_may_have(rank, world_size):
    meshes = {
        shape: init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)]) for shape in [(2,), (2, 1)]
    }
    for name, (make, options, use) in FEATURES.items() if rank == 0 else ():
        options = dict(options)
        mesh = options.pop("mesh", (2,))
        with fake():
            try:
                use(shard(make(), fully_shard, mesh=None if mesh is None else meshes[mesh], **options))
            except Exception as error:
                raise AssertionError(name) from error
    # what ranks compare of hooks, one parameter after the other, they compare as if nothing had happened
    two_steps(shard(with_extensions(), fully_shard))


@distributed(world_size=2)
def test_a_model_on_the_meta_device(rank, world_size):
    mesh = init_device_mesh("cpu", (2,))

    def train_from_meta() -> None:
        with torch.device("meta"):
            model = build()
        shard(model, fully_shard, mesh=mesh).to_empty(device="cpu")
        two_steps(model)

    if rank == 0:
        with fake():
            train_from_meta()


class Fails(nn.Module):
    """Raises in its forward, or in its backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.embedding = where, nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        if self.where == "forward":
            raise ArithmeticError("told to")
        x.register_hook(self.fail)
        return self.blocks[1](x)

    def fail(self, grad: torch.Tensor) -> None:
        raise ArithmeticError("told to")


@distributed(world_size=2)
def test_a_fake_step_that_fails(rank, world_size):
    if rank == 0:
        for where in ("forward", "backward"):
            with FakeTensorMode(), pytest.raises(ArithmeticError):
                two_steps(shard(Fails(where), fully_shard))
    for way in ("eager", "compiled"):
        assert_same(train(WAYS[way](shard(build(), fully_shard))), fsdp2_record(build()))
    assert RUNTIME.idle


@pytest.mark.more
@distributed(world_size=2)
def test_real_parameters_under_a_mode_that_takes_them(rank, world_size):
    """Without an optimizer's step: torch itself makes `parameter.mul_(number)` for real there. FSDP2's own model cannot
    be trained any more afterwards."""
    for way in ("eager", "compiled", "eager"):
        model = shard(build(), fully_shard)
        run = WAYS[way](model)
        if rank == 0:
            with FakeTensorMode(allow_non_fake_inputs=True):
                run(torch.zeros(4, 8, dtype=torch.int64)).mean().backward()
            assert isinstance(model.head.weight.grad.to_local(), FakeTensor)
        model.zero_grad()
        assert_same(train(run), fsdp2_record(build()))
        loss_of(run, rank, 0)  # the code is there now, and so is the plan that all ranks have agreed on
        if rank == 0:
            with FakeTensorMode(allow_non_fake_inputs=True):
                run(torch.zeros(4, 8, dtype=torch.int64)).mean().backward()
        model.zero_grad()
        loss_of(run, rank, 0).backward()
        assert not isinstance(model.head.weight.grad.to_local(), FakeTensor)


@pytest.mark.more
@distributed(world_size=2)
def test_compiled_autograd_that_was_entered_before(rank, world_size):
    if rank == 0:
        with compiled_autograd(codegen="aot_eager"), FakeTensorMode():
            model = shard(build(), fully_shard)
            with pytest.raises(RuntimeError, match=r"Enter compiled_autograd\(\) inside of FakeTensorMode"):
                two_steps(model)
    model = shard(build(), fully_shard)

    def backward(run: nn.Module, index: int) -> torch.Tensor:
        loss = loss_of(run, rank, index)
        with compiled_autograd(codegen="aot_eager"):
            loss.backward()
        return loss.detach()

    assert_same(train(model, backward), fsdp2_record(build()))


def peak_of(model: nn.Module, run: nn.Module) -> int:
    """Bytes at the peak of a step, the second one."""
    optimizer = torch.optim.AdamW(model.parameters())
    step(run, optimizer)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step(run, optimizer)
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.more
@distributed(world_size=2)
def test_torchs_memory_tracker_around_a_fake_step(rank, world_size):
    """Of a compiled model: in eager code the tracker's own hooks read parameters, which are gathered for them."""
    peaks, mesh = {}, init_device_mesh("cpu", (2,))
    with FakeTensorMode():
        for keep in (False, True):
            model = shard(small(blocks=4, dim=64), fully_shard, reshard_after_forward=not keep)
            peaks[keep] = peak_of(model, torch.compile(model, backend="compiled_fsdp"))
        model = shard(small(blocks=4, dim=64), torchs_fully_shard, mesh=mesh)
        assert peaks[False] <= peak_of(model, model)
    assert peaks[False] < peaks[True]
