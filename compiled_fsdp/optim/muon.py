"""Muon for sharded parameters: each matrix is orthogonalized by one rank, and all ranks keep their shards of the state.

The algorithm is torch.optim.Muon's (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compiled_fsdp.compat.autograd import local_of
from compiled_fsdp.compat.optim import adjusted_lr, newton_schulz, scalar, step_without_hooks
from compiled_fsdp.optim.exchange import Parts, exchange, parts_of


class Muon(torch.optim.Muon):
    """torch.optim.Muon for parameters that ``fully_shard`` has sharded.

    Momentum and weights stay sharded, so the state dict is that of torch.optim.Muon with DTensors, and each loads the
    other's. In a step each matrix's update goes to one rank in bfloat16, which torch.optim.Muon rounds it to as well;
    that rank does the Newton-Schulz iteration, and each rank gets its part of the result. Ranks do about equal work,
    and matrices are sent while others are computed. So parameters are equal bit for bit to those of torch.optim.Muon
    with whole matrices and the same gradients.

    In a group of n ranks, each rank sends (n - 1) / n of 4 bytes for each element of its shards. To gather every
    float32 gradient on all ranks, it would send n - 1 times 4 bytes for each.

    Example, with AdamW for the parameters that are no weight matrices of hidden layers::

        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embedding" in name]
        optimizer = compiled_fsdp.Muon(matrices, lr=0.02, adamw=[{"params": others, "lr": 3e-4}])

    Args:
        params: matrices, parameter groups, or named parameters, as for torch.optim.Muon. DTensors must have one
            ``Shard`` placement. Matrices that this rank has as a whole are updated as by torch.optim.Muon.
        lr: learning rate.
        adamw: parameters, or parameter groups, that torch.optim.AdamW's algorithm updates, with its options. They are
            groups of this optimizer too, so that schedulers and state dicts have them.
        options: the other arguments of torch.optim.Muon: ``weight_decay``, ``momentum``, ``nesterov``,
            ``ns_coefficients``, ``eps``, ``ns_steps``, ``adjust_lr_fn``.

    Raises:
        ValueError: a parameter of ``params`` is not a matrix, or an option has a value that torch.optim.Muon refuses.
        NotImplementedError: a matrix is divided along several dimensions of its mesh (tensor parallelism).
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, *, adamw: Iterable[Any] | None = None, **options: Any
    ) -> None:
        super().__init__(params, lr=lr, **options)  # type: ignore[arg-type]  # torch's own annotation lacks Tensor
        for group in () if adamw is None else torch.optim.AdamW(adamw).param_groups:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices; with the key ``betas`` one for AdamW's algorithm, with all of its options."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if _is_adamws(group):
            return
        try:
            _check(group)
        except (ValueError, NotImplementedError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the closure's loss.

        All ranks must call it, with gradients for the same parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = list(self._matrices())
        if matrices:
            exchange(
                [matrix.parts for matrix in matrices],
                lambda i: matrices[i].update(),
                lambda i, update: matrices[i].orthogonalized(update),
                lambda i, part: matrices[i].apply(part),
                cost=_products,
            )
        self._step_of_adamw()
        return loss

    def _matrices(self) -> Iterable[_Matrix]:
        for group in self.param_groups:
            if not _is_adamws(group):
                for param in group["params"]:
                    _place_gradient(param)
                given: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
                self._init_group(group, *given)  # type: ignore[no-untyped-call]
                yield from (_Matrix(*each, group) for each in zip(*given, strict=True))

    def _step_of_adamw(self) -> None:
        groups = list(filter(_is_adamws, self.param_groups))
        if not groups:
            return
        if not hasattr(self, "_adamw"):
            self._adamw = torch.optim.AdamW(groups)
        self._adamw.param_groups, self._adamw.state = groups, self.state
        step_without_hooks(self._adamw)


def _is_adamws(group: dict[str, Any]) -> bool:
    return "betas" in group  # no key of our own, so that state dicts are torch's


def _check(group: dict[str, Any]) -> None:
    """Check a group on all ranks, because in a step only the owner of a matrix would notice."""
    for param in group["params"]:
        if param.ndim != 2:
            raise ValueError(f"Muon only supports 2D parameters, but one has the size {tuple(param.shape)}.")
        parts_of(param)
    if not 0 <= group["ns_steps"] < 100:
        raise ValueError(f"Muon: ns_steps should be at least 0 and less than 100, but is {group['ns_steps']}.")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"Muon: ns_coefficients should be three numbers, but is {group['ns_coefficients']}.")


def _place_gradient(param: Tensor) -> None:
    """Give a gradient its parameter's placements: after tensor parallelism it may be a part of a sum."""
    grad = param.grad
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        param.grad = grad.redistribute(placements=param.placements)


class _Matrix:
    """One matrix in one step."""

    def __init__(self, param: Tensor, grad: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
        self.parts: Parts | None = parts_of(param)
        self._shape, self._group = param.shape, group
        self._param, self._grad, self._momentum = map(_local, (param, grad, momentum))

    def update(self) -> Tensor:
        """Add the gradient to the momentum; return this rank's part of what is orthogonalized, in bfloat16."""
        momentum = self._group["momentum"]
        self._momentum.lerp_(self._grad, 1 - momentum)
        update = self._grad.lerp(self._momentum, momentum) if self._group["nesterov"] else self._momentum
        return update.to(torch.bfloat16, copy=True)

    def orthogonalized(self, update: Tensor) -> Tensor:
        """Return the nearest orthogonal matrix, about, of a whole bfloat16 matrix."""
        return newton_schulz(update, self._group["ns_coefficients"], self._group["ns_steps"], self._group["eps"])

    def apply(self, part: Tensor) -> None:
        """Subtract this rank's part of the result from the weights."""
        lr = scalar(self._group["lr"])
        self._param.mul_(1 - lr * self._group["weight_decay"])
        self._param.add_(part, alpha=-adjusted_lr(lr, self._group["adjust_lr_fn"], self._shape))


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _products(shape: torch.Size) -> float:
    """The FLOPs of a Newton-Schulz step, which computes with the smaller side first, up to a factor."""
    small, large = sorted(shape)
    return float(2 * small * small * large + small**3)
