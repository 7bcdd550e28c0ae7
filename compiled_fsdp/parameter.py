"""One sharded parameter: its padded shard, its DTensor, its gate, and how forward reads it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from compiled_fsdp import ops, slots
from compiled_fsdp.compat import (
    dtensor_like,
    local_of,
    mark_static,
    never_a_frame_of_its_own,
    never_compiled,
    post_accumulate_grad_hooks,
    set_local,
)
from compiled_fsdp.reads import stored
from compiled_fsdp.runtime.boundary import BOUNDARY
from compiled_fsdp.runtime.eager import read as read_eagerly
from compiled_fsdp.runtime.gate import new_gate

if TYPE_CHECKING:
    from compiled_fsdp.group import ShardGroup
    from compiled_fsdp.unit import Unit


class ShardedParameter:
    """A parameter split by rows over a group.

    Every rank holds ``ceil(rows / world)`` rows in ``shard``, the last ranks padded with zeros. The DTensor's local tensor
    is the view of the rows that exist (``torch.chunk``'s rows, perhaps none), so optimizers, checkpoints and clipping see
    what FSDP2 shows them, and a collective sees equal sizes without a copy.

    Attributes:
        places: the modules and attribute names that hold the parameter; more than one if it is tied.
        size: the full shape. ``rows``: how many rows exist on this rank.
        shard: ``[ceil(size[0] / world), *size[1:]]``, of the parameter's dtype.
        gate: the gate's output (see ``runtime/gate.py``), of the shard's shape.
        slot: int64 CPU scalar that names this parameter in graphs. ``number``: its place among its unit's parameters.
        block, block_size, position: the repeated block that it belongs to (see ``unit.py``).
    """

    def __init__(
        self, param: nn.Parameter, places: list[tuple[nn.Module, str]], mesh: DeviceMesh, group: ShardGroup
    ) -> None:
        self.places = [(weakref.ref(module), name) for module, name in places]
        self.name = places[0][1]
        self.mesh, self.group = mesh, group
        self.size = tuple(param.shape)
        self.stride = param.stride()
        self.world = group.size
        self.dim = 0
        self.number = 0
        self.label = group.label
        self.block, self.block_size, self.position = 0, 1, 0
        self.slot_number, self.slot = slots.new_slot(self)
        self.unit: Unit

        padded_rows = -(-self.size[0] // self.world)
        start = min(group.rank * padded_rows, self.size[0])
        self.rows = min(padded_rows, self.size[0] - start)
        with torch.no_grad():
            shard = param.new_zeros((padded_rows, *self.size[1:]))
            shard[: self.rows].copy_(param.detach()[start : start + self.rows])
        self._adopt(shard)
        self.param = nn.Parameter(self._as_dtensor(), requires_grad=param.requires_grad)
        self._mark()
        for module, name in places:
            module._parameters[name] = self.param
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_refuser(weakref.ref(self)))

    # ---- layout ------------------------------------------------------------------------------------------------------
    def _adopt(self, shard: torch.Tensor) -> None:
        self.shard = shard
        self.gate = new_gate(self.slot_number, shard.shape, shard.dtype, shard.device)

    def _as_dtensor(self) -> DTensor:
        return DTensor.from_local(
            self.shard[: self.rows],
            self.mesh,
            [Shard(self.dim)],
            run_check=False,
            shape=torch.Size(self.size),
            stride=self.stride,
        )

    def _mark(self) -> None:
        # or layers of other widths make the shapes of parameters symbolic
        for tensor in (self.param, local_of(self.param), self.shard, self.gate):
            mark_static(tensor)

    def check(self, current: Any) -> None:
        """Raise ValueError if ``current`` is not a DTensor with this parameter's shape, mesh and placement."""
        if not (
            isinstance(current, DTensor)
            and current.shape == self.size
            and current.device_mesh == self.mesh
            and tuple(current.placements) == (Shard(self.dim),)
        ):
            got = (
                f"a DTensor {tuple(current.shape)} {current.placements}"
                if isinstance(current, DTensor)
                else f"a {type(current).__name__}"
            )
            raise ValueError(
                f"compiled_fsdp: parameter {self.name!r} was replaced by {got}; after fully_shard it must stay a DTensor of shape "
                f"{self.size} with placement Shard({self.dim}) on the same mesh. Assign before fully_shard, or load the value with "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict."
            )

    def is_current(self) -> bool:
        """Whether the DTensor's memory is still the shard's: ``torch.utils.swap_tensors`` and the like change it silently."""
        local = local_of(self.param)
        if self.rows == 0:  # a tensor without elements has no pointer of its own
            return local.untyped_storage().data_ptr() == self.shard.untyped_storage().data_ptr()
        return local.data_ptr() == self.shard.data_ptr()

    @never_compiled  # called by a hook in eager code, below a compiled call
    def refresh(self) -> None:
        """Follow a parameter that was moved, cast, loaded with ``assign``, swapped or replaced. Raises as ``check``."""
        module, attribute = self.owner
        current: Any = stored(module, attribute)
        self.check(current)
        self.param = cast(nn.Parameter, current)
        BOUNDARY.drop([self.param])  # perhaps loaded in place
        local = local_of(current)
        if _same_memory(local, self.shard[: self.rows]):
            return
        with torch.no_grad():
            if self.rows == self.shard.shape[0] and local.is_contiguous():
                self._adopt(local.detach())
            else:
                shard = local.new_zeros(self.shard.shape)
                shard[: self.rows].copy_(local)
                self._adopt(shard)
                set_local(current, self.shard[: self.rows])
        self._mark()

    @property
    def owner(self) -> tuple[nn.Module, str]:
        """The first module that holds the parameter, and the attribute's name."""
        return next(self.live_places())

    def live_places(self) -> Iterator[tuple[nn.Module, str]]:
        """Every living module that holds the parameter, with the attribute's name."""
        for reference, name in self.places:
            if (module := reference()) is not None:
                yield module, name

    # ---- forward -----------------------------------------------------------------------------------------------------
    def read(self) -> torch.Tensor:
        """The full parameter, ``size``, inside a forward of its unit: gathered once a forward (or recomputation)."""
        if self.shard.is_meta:
            self.unit.raise_meta()
        tied = self.unit.tied
        if tied is not None and self.number in tied:
            return tied[self.number]
        if torch.compiler.is_compiling():
            kept = self.unit.kept
            return self._unshard(self.unit.keep) if kept is None else self._read_full(kept[self.number])
        if (kept := self.unit.kept_now()) is not None:
            return ops.ReadFull.apply(kept[self.number], *self._full_arguments())
        return read_eagerly(self, self.unit.gathered())

    def _unshard(self, keep: bool) -> torch.Tensor:
        return ops.unshard(
            self.shard, self.gate if self.param.requires_grad else None, self.slot, self.size, self.world, self.label,
            self.dim, self.block_size, self.position, keep,
        )  # fmt: skip

    def read_for_backward(self) -> torch.Tensor:
        """The full parameter, ``size``, in compiled autograd's graph, where eager code has read it in forward."""
        return self._unshard(keep=False)

    def _read_full(self, full: torch.Tensor) -> torch.Tensor:
        return ops.read_full(full, *self._full_arguments())

    def _full_arguments(self) -> tuple[Any, ...]:
        return (
            self.gate if self.param.requires_grad else None, self.slot, tuple(self.shard.shape), self.world, self.label,
            self.dim, self.block_size, self.position,
        )  # fmt: skip

    # ---- backward ----------------------------------------------------------------------------------------------------
    def publish(self, grad: torch.Tensor, owned: bool = False) -> None:
        """Add the shard's reduced gradient (padded shape) to ``.grad`` and run the post-accumulate-grad hooks.

        ``grad`` is copied unless its memory is ``owned``: a compiled backward may use its own again.
        """
        param = self.param
        self.unit.reshard()
        with torch.no_grad():
            rows = grad[: self.rows]
            if param.grad is None:
                param.grad = dtensor_like(param, rows if owned else rows.clone(memory_format=torch.contiguous_format))
            else:
                local_of(param.grad).add_(rows)
        hooks = post_accumulate_grad_hooks(param)
        if hooks:
            BOUNDARY.drop([param])  # a hook may update it
        for hook in hooks:
            hook(param)


for _function in (
    ShardedParameter.read, ShardedParameter._unshard, ShardedParameter._read_full, ShardedParameter._full_arguments,
    ShardedParameter.publish, ShardedParameter.is_current, ShardedParameter.check, dtensor_like, local_of,
):  # fmt: skip
    never_a_frame_of_its_own(_function)


def _refuser(sharded: weakref.ref[ShardedParameter]) -> Callable[[torch.Tensor], None]:
    """A hook for the parameter that was sharded: whoever computes with the old tensor would train nothing, silently."""

    def refuse(param: torch.Tensor) -> None:
        parameter = sharded()
        if parameter is None:  # the sharded model is gone, and the old parameter is its owner's again
            return
        name = parameter.name
        raise RuntimeError(
            f"compiled_fsdp: a gradient reached the unsharded {name!r}, which the model had before fully_shard. Something still computes with "
            f"it: a list, a closure or another module that holds the old parameter. Read it as the module's attribute ({name!r} of the "
            "sharded model) where it is used, or make the list after fully_shard, inside forward."
        )

    return refuse


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_meta or b.is_meta or a.dtype != b.dtype or a.device != b.device:
        return a is b
    if a.numel() == 0:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
