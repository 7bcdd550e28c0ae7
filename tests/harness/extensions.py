"""Tensors with FSDP2's all-gather extensions, and a training loop that returns only local shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.harness.models import loss_of


class Split(torch.Tensor):
    """A float32 tensor that is gathered in 3 bytes per element: rounded to bfloat16, and the remainder in float8.

    Otherwise it behaves like its ``data_``. ``fsdp_pre_all_gather`` takes only the mesh. The full parameter is a plain
    tensor.
    """

    @staticmethod
    def __new__(cls, data: Tensor) -> Split:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self.data_ = data

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        rounded = self.data_.to(torch.bfloat16)
        return (rounded, (self.data_ - rounded.float()).to(torch.float8_e5m2)), ("split", mesh.size())

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        assert metadata == ("split", 2), metadata
        rounded, rest = outputs
        full = (rounded.float() + rest.float()).to(param_dtype)
        if out is None:
            return full, (full,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(full[: out.size(0)])
        return None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(Split, lambda tensor: tensor.data_, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, cls, out)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Split:
        return cls(inner["data_"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data_})"


class Padded(Split):
    """A ``Split`` that also works with uneven shards. ``fsdp_pre_all_gather`` takes later FSDP2 versions' arguments."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Module)
        assert math.prod(outer_size[1:]) == outer_stride[0]
        assert mp_policy.param_dtype is None
        rows = -(-outer_size[0] // mesh.size())
        padded = self.data_.new_zeros(rows, *outer_size[1:])
        padded[: self.data_.size(0)].copy_(self.data_)
        return Split(padded).fsdp_pre_all_gather(mesh)


class Two(TwoTensor):
    """Two tensors, both gathered. The full parameter, and all that is computed with it, are also two tensors."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        a, b = outputs
        if out is not None:
            if a.dtype != param_dtype:
                out.a.copy_(a)
                out.b.copy_(b)
            return None
        return Two(a, b).to(param_dtype), (a, b)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Two:
        return Two(inner["a"], inner["b"], size, stride)


def two(data: Tensor) -> Two:
    return Two(data, data.clone())


def wrap(model: nn.Module, kind: Callable[[Tensor], Tensor], *names: str, trains: bool = True) -> nn.Module:
    """Replace the parameters whose names end in one of ``names`` by ``kind(parameter)``; return the model."""
    for name, param in list(model.named_parameters()):
        if name.endswith(names):
            module = model.get_submodule(name.rpartition(".")[0])
            setattr(module, name.rpartition(".")[2], nn.Parameter(kind(param.detach()), requires_grad=trains))
    return model


def plain(tensor: Any) -> Tensor:
    """Return a copy of the (first) plain tensor inside a local shard or a result."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    for name in ("data_", "a", "_tensor", "_data"):
        if name in vars(tensor):
            return plain(vars(tensor)[name])
    return tensor.detach().clone()


def train_locally(
    model: nn.Module,
    run: nn.Module | None = None,
    *,
    steps: int = 3,
    step: Callable[[nn.Module, int], Tensor] = lambda run, index: loss_of(run, dist.get_rank(), index),
    after: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Train by AdamW; return this rank's losses, then for each step its local gradients and parameters."""
    params = list(model.parameters())  # now, because FSDP2 shows other parameters while they are unsharded
    optimizer = torch.optim.AdamW([p for p in params if p.requires_grad], lr=0.01)
    found, losses = [], []
    for index in range(steps):
        loss = step(model if run is None else run, index)
        loss.backward()
        losses.append(plain(loss))
        found += [plain(p.grad) for p in params if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [plain(p) for p in params]
        after()
    return [*losses, *found]


def assert_all_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.shape == other.shape, (number, mine.shape, other.shape)
        assert torch.equal(mine, other), (number, (mine - other).abs().max())
