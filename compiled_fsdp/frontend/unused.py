"""Zero gradients for the parameters of a unit that a forward did not use (``set_reduce_scatter_unused_params``).

Ranks that take different ways through a model (for example, through different experts) must still gather and reduce the
same parameters. So the forward of a unit with the flag first reads all of its trainable parameters, in registration
order, and ties them to its output: in backward each gets a zero gradient, to which the gradients of its uses are added.
This is done by a wrapper around the module's ``forward``, because the hooks of a compiled module run outside of its
graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compiled_fsdp.compat.autograd import dtensor_like, local_of
from compiled_fsdp.compat.modules import tree_flatten, tree_unflatten
from compiled_fsdp.compat.nested_regions import keep_writes_after_bodies
from compiled_fsdp.frontend.read import read_local
from compiled_fsdp.ops import schema
from compiled_fsdp.ops.autograd import zero_grads
from compiled_fsdp.ops.calls import trains_now
from compiled_fsdp.state.unit import Unit


def use_all(module: nn.Module, unit: Unit) -> None:
    """Let ``module``'s forward use all trainable parameters of its unit."""
    inner = module.forward
    if hasattr(inner, "uses_all_of"):
        return
    if wrapped := [parameter.name for parameter in unit.parameters if parameter.wrapped]:
        raise NotImplementedError(
            f"compiled_fsdp: set_reduce_scatter_unused_params: {wrapped[0]!r} has all-gather extensions, or is made of "
            "other tensors, and cannot get a gradient of zeros. Make each module that a rank may skip a unit of its "
            "own, or leave the extensions off."
        )

    def forward(*args: Any, **kwargs: Any) -> Any:
        if unit.zero_grad_params is not None:
            return inner(*args, **kwargs)
        unit.refuse_unknown_zeros()
        keep_writes_after_bodies()  # the module's hooks call it, too, but outside of the graph if it is compiled itself
        # local tensors, because under tensor parallelism each read makes a DTensor of its own
        unit.zero_grad_params = {p.index: read_local(p, unit) for p in unit.parameters if trains_now(p)}
        try:
            output = inner(*args, **kwargs)
            fulls = list(unit.zero_grad_params.values())
        finally:
            keep_writes_after_bodies()
            unit.zero_grad_params = None
        return _tie(output, fulls)

    forward.uses_all_of = inner  # type: ignore[attr-defined]
    module.forward = forward


def use_what_is_read(module: nn.Module) -> None:
    """Undo ``use_all``."""
    inner = getattr(module.forward, "uses_all_of", None)
    if inner is None:
        return
    del module.__dict__["forward"]
    if module.forward != inner:  # other code had replaced it on the instance before ``use_all``
        module.forward = inner


def _tie(output: Any, fulls: list[Tensor]) -> Any:
    """Tie ``fulls`` to ``output`` (a pytree), so that its backward gives each of them a zero gradient.

    Also done without gradients, so that ``fulls`` are gathered even if nothing else reads them.

    Returns: the new output; ``output`` itself if it holds no tensor of real or complex numbers.
    """
    leaves, spec = tree_flatten(output)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            leaves[i] = _use_beside(leaf, *fulls) if isinstance(leaf, DTensor) else schema.use(leaf, fulls)
            return tree_unflatten(leaves, spec)
    return output


class _UseBeside(torch.autograd.Function):
    """``schema.use`` for a DTensor: on its local tensor, because a custom op has no sharding strategy.

    The DTensor's gradient passes unchanged, whatever its placements. With ``to_local`` and ``from_local`` a Partial
    gradient would be all-reduced.
    """

    @staticmethod
    def forward(ctx: Any, output: DTensor, *fulls: Tensor) -> DTensor:
        ctx.save_for_backward(*fulls)
        return dtensor_like(output, schema.use(local_of(output), list(fulls)))

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Tensor | None, ...]:
        return grad, *zero_grads(ctx.saved_tensors, None if grad is None else local_of(grad))


@torch.compiler.allow_in_graph  # so that AOTAutograd sees the placements that gradients really have
def _use_beside(output: DTensor, *fulls: Tensor) -> DTensor:
    return _UseBeside.apply(output, *fulls)
