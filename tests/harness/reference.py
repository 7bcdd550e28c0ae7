"""One training loop for models under any kind of sharding, and the comparison of its results."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.harness.models import loss_of

Step = Callable[[nn.Module, int], torch.Tensor]
Sharding = Callable[..., nn.Module]  # `fully_shard` of FSDP2 or of compiled_fsdp
Tensors = dict[str, torch.Tensor | None]

WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}  # DDP, torch.compile, activation checkpointing


@dataclass
class Record:
    """The results of a training run, one entry per step; full tensors by the plain model's parameter names."""

    losses: list[torch.Tensor] = field(default_factory=list)  # this rank's scalars
    gradients: list[Tensors] = field(default_factory=list)  # before the optimizer's step; None: no gradient
    parameters: list[Tensors] = field(default_factory=list)  # after the optimizer's step


def shard(model: nn.Module, fully_shard: Callable[..., Any], **options: Any) -> nn.Module:
    """Call `fully_shard`, of FSDP2 or compiled_fsdp, on each of `model.blocks`, then on the model; return the model."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    """Shard the model by FSDP2: a unit per block, and the root."""
    return shard(model, fully_shard, **options)


def ddp(model: nn.Module) -> nn.Module:
    """Replicate the model by torch's DistributedDataParallel."""
    return DistributedDataParallel(model)


def forward_backward(model: nn.Module, step: int) -> torch.Tensor:
    """Run one forward and backward on this rank's batch. Returns the detached loss."""
    loss = loss_of(model, dist.get_rank(), step)
    loss.backward()
    return loss.detach()


def alone(world_size: int) -> Step:
    """Return a step that gives an unwrapped model the gradients of `world_size` ranks. Its loss is rank 0's.

    With 2 ranks it is exact, because halving a loss halves every gradient exactly, and a sum of two has only one order.
    """

    def step_of_all(model: nn.Module, step: int) -> torch.Tensor:
        losses = [loss_of(model, rank, step) for rank in range(world_size)]
        for loss in losses:
            (loss / world_size).backward()
        return losses[0].detach()

    return step_of_all


def train(
    model: nn.Module,
    step: Step = forward_backward,
    *,
    steps: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
) -> Record:
    """Run `steps` times `step(model, index)`, which leaves gradients, and the optimizer (AdamW of rate 0.01 if None).

    Every rank must call it, because full tensors are gathered after each step. No tensor of the record aliases the
    model.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    record = Record()
    for index in range(steps):
        optimizer.zero_grad()
        record.losses.append(step(model, index).clone())
        record.gradients.append(full_gradients(model))
        optimizer.step()
        record.parameters.append({name: full(p) for name, p in _named_parameters(model)})
    return record


def fsdp2_record(model: nn.Module, *, steps: int = 3, **options: Any) -> Record:
    """Return ``train(fsdp2(model, **options), steps=steps)``, computed once per process for equal models and options.

    Models are equal if they have the same classes, attributes and tensors, tied in the same way. Callers must not
    change the record.
    """
    others: list[Any] = [options]  # kept, so that no other object gets the same id
    key = _fingerprint(model, others), repr(sorted(options.items())), steps
    if key not in _records:
        _records[key] = train(fsdp2(model, **options), steps=steps), others
    return _records[key][0]


_records: dict[tuple[Any, ...], tuple[Record, list[Any]]] = {}


def _fingerprint(model: nn.Module, others: list[Any]) -> str:
    """Return a text that is the same only for equal models. Attributes that are neither plain values nor attributes of
    every ``nn.Module`` count by their identity, and are added to ``others``."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name} {type(module).__module__} {type(module).__qualname__}".encode())
        for attribute, value in sorted(vars(module).items()):
            if isinstance(value, (bool, int, float, str, torch.dtype, type(None))):
                digest.update(f"{attribute} {value!r}".encode())
            elif attribute not in _OF_EVERY_MODULE:
                digest.update(f"{attribute} {id(value)}".encode())
                others.append(value)
    places: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        first = places.setdefault(id(tensor), name)
        digest.update(f"{name} {first} {tensor.dtype} {tensor.shape} {tensor.requires_grad}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_OF_EVERY_MODULE = set(vars(nn.Module()))


def assert_same(
    actual: Record, expected: Record, *, rtol: float = 0.0, rtol_of_parameters: float | None = None
) -> None:
    """Raise AssertionError naming the first step and tensor that differ: losses first, then gradients, parameters.

    Without `rtol` equal means `torch.equal`; with it, no element may differ by more than `rtol` times the expected
    tensor's largest magnitude. Parameters may have another limit, because an optimizer such as Adam divides by a
    gradient's size, and so amplifies small differences.
    """
    limits = {"gradients": rtol, "parameters": rtol if rtol_of_parameters is None else rtol_of_parameters}
    assert len(actual.losses) == len(expected.losses), f"{len(actual.losses)} steps, not {len(expected.losses)}"
    for step in range(len(expected.losses)):
        _assert_close(actual.losses[step], expected.losses[step], rtol, f"step {step}: loss")
        for kind, limit in limits.items():
            ours, theirs = getattr(actual, kind)[step], getattr(expected, kind)[step]
            assert ours.keys() == theirs.keys(), f"step {step}: {kind} of other names: {ours.keys() ^ theirs.keys()}"
            for name, tensor in theirs.items():
                _assert_close(ours[name], tensor, limit, f"step {step}: {kind} of {name}")


def _assert_close(actual: torch.Tensor | None, expected: torch.Tensor | None, rtol: float, what: str) -> None:
    if actual is None or expected is None:
        assert actual is expected, f"{what}: {_kind(actual)}, not {_kind(expected)}"
        return
    assert _kind(actual) == _kind(expected), f"{what}: {_kind(actual)}, not {_kind(expected)}"
    if torch.equal(actual, expected):
        return
    error, limit = (actual - expected).abs().max().item(), rtol * expected.abs().max().item()
    assert error <= limit, f"{what}: differs by {error:.3g}, more than {limit:.3g}"  # NaN fails too


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters with the names that they have in the model without wrappers."""
    return [(".".join(n for n in name.split(".") if n not in WRAPPERS), p) for name, p in model.named_parameters()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a full copy of a tensor; for a DTensor this is a collective call."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def full_gradients(model: nn.Module) -> Tensors:
    """Return full gradients by the plain model's parameter names; None for a parameter without a gradient."""
    return {name: None if p.grad is None else full(p.grad) for name, p in _named_parameters(model)}


def assert_same_gradients(model: nn.Module, reference: nn.Module, *, rtol: float = 0, atol: float = 0) -> None:
    """Raise AssertionError naming the first parameter whose full gradient differs from the reference's."""
    torch.testing.assert_close(full_gradients(model), full_gradients(reference), rtol=rtol, atol=atol)


# Compares nested containers of tensors and numbers bit for bit; the error names the place.
assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def assert_near(actual: Record, expected: Record, *, gradients: float, parameters: float) -> None:
    """Raise AssertionError if an element differs by more than the given absolute limits."""
    for kind, limit in (("gradients", gradients), ("parameters", parameters)):
        for step, (ours, theirs) in enumerate(zip(getattr(actual, kind), getattr(expected, kind), strict=True)):
            assert ours.keys() == theirs.keys()
            for name, tensor in theirs.items():
                error = (ours[name] - tensor).abs().max().item()
                assert error <= limit, f"step {step}: {kind} of {name}: differs by {error:.3g}, more than {limit:.3g}"
