"""`Muon` beside torch.optim.Muon with whole matrices, and `map_whole`."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from compiled_fsdp import Muon, count_communication, fully_shard, map_whole
from tests.harness import compiled, distributed
from tests.harness.meshes import mesh_2d
from tests.harness.models import small

SHAPES = [(8, 6), (6, 8), (5, 3), (1, 7), (16, 4), (3, 3)]  # uneven, and with fewer rows than four ranks


def whole_matrices(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def sharded(tensors: list[Tensor], mesh: Any, dims: list[int]) -> list[Tensor]:
    last = mesh.ndim - 1
    placements = [[*(Replicate(),) * last, Shard(dim)] for dim in dims]
    return [distribute_tensor(t, mesh, placement) for t, placement in zip(tensors, placements, strict=True)]


def parameters(mesh: Any = None, dims: tuple[int, ...] = (0,)) -> list[nn.Parameter]:
    tensors = whole_matrices(0)
    if mesh is not None:
        tensors = sharded(tensors, mesh, [dims[i % len(dims)] for i in range(len(tensors))])
    return [nn.Parameter(t) for t in tensors]


def steps(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, count: int = 3, first: int = 0) -> list[Tensor]:
    for step in range(first, first + count):
        for i, (param, grad) in enumerate(zip(params, whole_matrices(step + 1), strict=False)):
            param.grad = None
            if (i, step) != (2, 1):  # one parameter has no gradient in one step
                if isinstance(param, DTensor):
                    grad = distribute_tensor(grad, param.device_mesh, param.placements)
                param.grad = grad
        optimizer.step()
    return whole(params)


def whole(tensors: Any) -> list[Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for t in tensors]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(theirs)


OPTIONS = [
    {},
    {"nesterov": False, "momentum": 0.5, "weight_decay": 0.0},
    {"lr": torch.tensor(0.02), "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
]


def equals_torch(mesh: Any) -> None:
    for options in OPTIONS:
        for dims in ((0,), (1,), (0, 1)):
            expected = parameters()
            theirs = steps(expected, torch.optim.Muon(expected, **options))
            params = parameters(mesh, dims)
            assert_equal(steps(params, Muon(params, **options)), theirs)
    assert_equal(steps(plain := parameters(), Muon(plain)), steps(expected := parameters(), torch.optim.Muon(expected)))


@distributed(world_size=2)
def test_equals_torch_with_whole_matrices(rank, world_size):
    equals_torch(init_device_mesh("cpu", (world_size,)))


@distributed(world_size=4)
def test_equals_torch_on_four_ranks_and_with_replicas(rank, world_size):
    equals_torch(init_device_mesh("cpu", (world_size,)))
    equals_torch(mesh_2d("replicate", "shard"))


@distributed(world_size=4)
def test_bytes(rank, world_size):
    """Half of what a gather of every gradient in bfloat16 would send; a quarter of one in float32."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = [nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)])) for _ in range(8)]
    for param in params:
        param.grad = torch.ones_like(param)
    to_others, all_to_all = 0, dist.all_to_all_single

    def counted(received: Tensor, sent: Tensor, taken: list[int], given: list[int], **options: Any) -> Any:
        nonlocal to_others
        assert (sum(given), sum(taken)) == (sent.nbytes, received.nbytes)
        to_others += sum(given) - given[rank]
        return all_to_all(received, sent, taken, given, **options)

    with count_communication() as volume, mock.patch.object(dist, "all_to_all_single", counted):
        Muon(params).step()
    shards = sum(param.to_local().nbytes for param in params)
    assert to_others == (world_size - 1) * shards / 4  # a gather in a ring sends (world_size - 1) * shards
    assert volume["exchange"].sent == to_others


@distributed(world_size=2)
def test_state_dicts_are_torchs(rank, world_size):
    """One optimizer saves, the other one goes on. Torch's refuses DTensors of some shapes."""
    mesh, even = init_device_mesh("cpu", (world_size,)), slice(2)
    expected = steps(params := parameters(mesh)[even], Muon(params), 4)
    for first, second in ((Muon, torch.optim.Muon), (torch.optim.Muon, Muon)):
        params = parameters(mesh)[even]
        steps(params, optimizer := first(params), 2)
        state = copy.deepcopy(optimizer.state_dict())
        resumed = second(params)
        resumed.load_state_dict(state)
        found = steps(params, resumed, 2, first=2)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.002)  # torch multiplies shards, in another order


@distributed(world_size=1)
def test_checkpoints_are_torchs(rank, world_size):
    """DCP asks for exactly the keys that the optimizer has."""
    for first, second in ((Muon, torch.optim.Muon), (torch.optim.Muon, Muon)):
        for flatten in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            states = []
            for kind in (first, second):
                model = nn.Sequential(nn.Linear(4, 4, bias=False))
                optimizer = kind(model.parameters(), lr=0.1)
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                states.append(get_optimizer_state_dict(model, optimizer, options=options))
            assert _keys(states[0]) == _keys(states[1])


def _keys(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _keys(value) for key, value in state.items()}
    return [_keys(each) for each in state] if isinstance(state, list) else None


@distributed(world_size=2)
def test_gradients_with_other_placements(rank, world_size):
    """After tensor parallelism a gradient may be a part of a sum."""
    mesh = init_device_mesh("cpu", (world_size,))
    weight = nn.Parameter(distribute_tensor(torch.eye(4), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.full((4, 4), rank + 1.0), mesh, [Partial()])
    Muon([weight]).step()
    expected = nn.Parameter(torch.eye(4))
    expected.grad = torch.full((4, 4), 3.0)
    torch.optim.Muon([expected]).step()
    assert torch.equal(weight.to_local(), expected)


@distributed(world_size=2)
def test_an_error_on_the_owner(rank, world_size):
    """The other rank does not wait for its result."""
    mesh = init_device_mesh("cpu", (world_size,))
    (tensor,) = sharded([torch.eye(4)], mesh, [0])

    def fails(i: int, matrix: Tensor) -> Tensor:
        raise KeyError("out of luck")

    if rank == 0:
        with pytest.raises(KeyError, match="out of luck"):
            map_whole(fails, [tensor])
    else:
        assert map_whole(fails, [tensor])[0].to_local().isnan().all()
    with pytest.raises(ValueError, match=r"ns_steps .* but is 100"):
        Muon([nn.Parameter(tensor)], ns_steps=100)
    with pytest.raises(ValueError, match="ns_coefficients should be three numbers"):
        Muon([nn.Parameter(tensor)], ns_coefficients=(1.0, 2.0))


def test_groups_that_are_added_later_and_hooks():
    first, second, third = (nn.Parameter(torch.eye(4)) for _ in range(3))
    optimizer = Muon([first], adamw=[third])
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    with pytest.raises(ValueError, match="only supports 2D"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    assert len(optimizer.param_groups) == 3
    for param in (first, second, third):
        param.grad = torch.ones(4, 4)
    seen: list[str] = []
    hook = register_optimizer_step_post_hook(lambda of, args, kwargs: seen.append(type(of).__name__))
    optimizer.step()
    hook.remove()
    assert seen == ["Muon"]
    assert not any(torch.equal(param, torch.eye(4)) for param in (first, second, third))


def test_the_function_gets_a_copy():
    tensor = torch.ones(2, 2, requires_grad=True)
    (doubled,) = map_whole(lambda i, whole: whole.mul_(2), [tensor])
    assert torch.equal(tensor, torch.ones(2, 2))
    assert not doubled.requires_grad


@distributed(world_size=2)
def test_mixed_groups(rank, world_size):
    """Muon for matrices and AdamW for the rest, with a scheduler, a compiled model, and a resumed state."""

    def build() -> tuple[nn.Module, list[nn.Parameter], list[nn.Parameter]]:
        model = small()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        return model, matrices, [p for p in model.parameters() if not any(p is m for m in matrices)]

    def train(model: nn.Module, *optimizers: torch.optim.Optimizer, count: int = 3) -> list[Tensor]:
        run = compiled(model)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
        for step in range(count):
            tokens = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(2 * step + rank))
            run(tokens).square().mean().backward()
            for each in (*optimizers, *schedulers):
                each.step()
            for each in optimizers:
                each.zero_grad()
        return whole(model.parameters())

    model, matrices, others = build()
    together = Muon(matrices, lr=0.02, adamw=[{"params": others, "lr": 3e-4, "betas": (0.8, 0.9)}])
    ours = train(model, together)
    reference, matrices, others = build()
    apart = Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4, betas=(0.8, 0.9))
    assert_equal(ours, train(reference, *apart))

    saved = copy.deepcopy(get_optimizer_state_dict(model, together))  # torch loads without a copy
    again, matrices, others = build()
    resumed = Muon(matrices, lr=0.1, adamw=others)
    set_optimizer_state_dict(again, resumed, saved)
    again.load_state_dict(model.state_dict())
    assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in together.param_groups]
    assert_equal(train(again, resumed, count=1), train(model, together, count=1))


@distributed(world_size=2)
def test_with_torchs_own_sharding(rank, world_size):
    model = small()
    torch_fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    before = whole(matrices)
    model(torch.randint(60, (2, 16))).square().mean().backward()
    Muon(matrices).step()
    assert not any(map(torch.equal, before, whole(matrices)))


@distributed(world_size=2)
def test_map_whole(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = sharded(whole_matrices(0), mesh, [0, 1, 0, 1, 0, 1])
    mine: list[int] = []

    def inverse(i: int, matrix: Tensor) -> Tensor:
        mine.append(i)
        return torch.linalg.pinv(matrix).T.contiguous()

    results = map_whole(inverse, tensors)
    assert all(r.placements == t.placements for r, t in zip(results, tensors, strict=True))
    assert_equal(whole(results), [torch.linalg.pinv(t).T for t in whole_matrices(0)])
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    assert sorted(i for own in everyone for i in own) == list(range(len(tensors)))
    again, mine = mine, []
    map_whole(inverse, tensors)
    assert mine == again  # the same owners, so that a function may keep a state

    with pytest.raises(ValueError, match=r"must return a tensor of shape \(4, 4\) and dtype torch.float32"):
        map_whole(lambda i, matrix: matrix[:2], sharded([torch.eye(4)] * 2, mesh, [0, 0]))
    mixed = [distribute_tensor(torch.eye(4, dtype=dtype), mesh, [Shard(0)]) for dtype in (torch.float32, torch.float64)]
    with pytest.raises(ValueError, match=r"one dtype, but have torch.float32, torch.float64"):
        map_whole(lambda i, matrix: matrix, mixed)


@distributed(world_size=4)
def test_what_it_cannot_put_together(rank, world_size):
    both = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh_2d("a", "b"), [Shard(0), Shard(1)]))
    with pytest.raises(NotImplementedError, match=r"shape \(8, 8\) has placements .* torch.optim.AdamW"):
        Muon([both])
    with pytest.raises(ValueError, match="only supports 2D"):
        Muon([nn.Parameter(torch.randn(8))])
    scaled_down = init_device_mesh("cpu", (1, 4))
    Muon([nn.Parameter(distribute_tensor(torch.randn(8, 8), scaled_down, [Shard(0), Shard(1)]))])
