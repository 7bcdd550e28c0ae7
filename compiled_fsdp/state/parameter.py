"""One sharded parameter: its padded shard, its DTensor, its gate, and how forward reads it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compiled_fsdp import ops
from compiled_fsdp.comm import collectives
from compiled_fsdp.comm.reduction import ALL, NONE, Reduction
from compiled_fsdp.compat import (
    dtensor_like,
    local_of,
    mark_static,
    never_a_frame_of_its_own,
    never_compiled,
    post_accumulate_grad_hooks,
    set_local,
)
from compiled_fsdp.frontend.eager_reads import read as read_eagerly
from compiled_fsdp.frontend.eager_reads import read_full
from compiled_fsdp.frontend.read import stored
from compiled_fsdp.runtime.gate import new_gate
from compiled_fsdp.runtime.prefetcher import BOUNDARY
from compiled_fsdp.runtime.reducer import SCATTERED, WAITS
from compiled_fsdp.sharding.layout import Layout
from compiled_fsdp.sharding.offload import Offload
from compiled_fsdp.sharding.precision import Dtypes
from compiled_fsdp.state import registry

if TYPE_CHECKING:
    from compiled_fsdp.state.unit import Unit


class ShardedParameter:
    """A parameter split along a dimension over a group.

    Every rank holds ``ceil(size[dim] / world)`` rows in ``shard``, the last ranks padded with zeros. The DTensor's local tensor
    is the view of the rows that exist (``torch.chunk``'s rows, perhaps none), so optimizers, checkpoints and clipping see
    what FSDP2 shows them, and a collective sees equal sizes without a copy.

    Attributes:
        places: the modules and attribute names that hold the parameter; more than one if it is tied.
        layout: how it lies on the meshes. ``size``: the full shape, on this rank under tensor parallelism. ``rows``: how many exist.
        shard: ``layout.padded``, of the parameter's dtype; on the CPU if it is offloaded. ``device``: where it is gathered.
        dtype, reduce_dtype: in which it is gathered, and its gradient reduced; ``policy``: of these what mixed precision says.
        gate: the gate's output (see ``runtime/gate.py``), of the shard's shape, None for integers; ``waiting_gate``, ``scattered_gate``: of
            gradients that wait, once there are any. ``waiting``, ``scattered``: those gradients, full ones and those of the shard.
        retained: the full parameter, kept beyond a forward and backward (``set_reshard_after_backward``).
        how: how a gradient is reduced over all ranks; ``texts``: the same for graphs, by how far it is reduced and whether what
            waits is added; ``reduction``: now.
        slot: int64 CPU scalar that names this parameter in graphs. ``number``: its place among its unit's parameters.
        block, block_size, position: the repeated block that it belongs to (see ``unit.py``).
    """

    def __init__(self, param: nn.Parameter, places: list[tuple[nn.Module, str]], layout: Layout, policy: Dtypes,
                 device: torch.device, offload: Offload | None = None) -> None:  # fmt: skip
        self.places = [(weakref.ref(module), name) for module, name in places]
        self.name = places[0][1]
        self.layout, self.group = layout, layout.group
        self.size, self.rows, self.dim = layout.size, layout.rows, layout.dim
        self.world = self.group.size
        self.policy = policy
        self.dtype, self.reduce_dtype = policy.of(param.dtype)
        self.device, self.offload = device, offload
        self.number = 0
        self.label = self.group.label
        self.block, self.block_size, self.position = 0, 1, 0
        self.slot_number, self.slot = registry.new_slot(self)
        self.unit: Unit
        self.waiting_gate: torch.Tensor | None = None
        self.scattered_gate: torch.Tensor | None = None
        self.waiting: torch.Tensor | None = None
        self.scattered: torch.Tensor | None = None
        self.retained: torch.Tensor | None = None
        self.how = Reduction()
        self.texts: dict[tuple[str, bool], str] = {}
        self.reduction = ""

        with torch.no_grad():
            shard = layout.shard_of(local_of(param) if isinstance(param, DTensor) else param.detach())
            self._adopt(shard if offload is None else offload.put_away(shard))
        self.param = nn.Parameter(layout.dtensor(self._own()), requires_grad=param.requires_grad)
        self._mark()
        for module, name in places:
            module._parameters[name] = self.param
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_refuser(weakref.ref(self)))

    # ---- layout ------------------------------------------------------------------------------------------------------
    def _adopt(self, shard: torch.Tensor) -> None:
        self.shard = shard
        # integers, which are frozen for ever, can have none; others may be thawed
        self.gate = new_gate(self.slot_number, shard.shape, shard.dtype, shard.device) if self._may_train() else None
        if self.waiting_gate is not None:
            self.make_waiting_gates()

    def make_waiting_gates(self) -> None:
        """Gates for gradients that wait."""
        if not self._may_train():
            return
        device = self.device if self.offload is not None else self.shard.device
        self.waiting_gate = new_gate(self.slot_number, torch.Size(()), torch.float32, device, WAITS)
        self.scattered_gate = new_gate(self.slot_number, self.shard.shape, self.reduce_dtype, device, SCATTERED)
        mark_static(self.scattered_gate)

    def _may_train(self) -> bool:
        """Whether the parameter's dtype has gradients."""
        return self.shard.is_floating_point() or self.shard.is_complex()

    def _own(self) -> torch.Tensor:
        """The rows of the shard that exist."""
        return self.shard.narrow(self.dim, 0, self.rows)

    @property
    def together(self) -> tuple[Any, ...]:
        """What parameters that share a collective outside of graphs have in common: the block first."""
        return self.block, self.dtype, self.reduce_dtype, self.label

    @property
    def compute_device(self) -> torch.device | None:
        """Where it is gathered, if it is offloaded."""
        return self.device if self.offload is not None else None

    def sent(self) -> torch.Tensor:
        """The shard as a gather sends it, in one dimension."""
        return collectives.to_gather(self.shard, self.dtype, self.compute_device)

    def _mark(self) -> None:
        # or layers of other widths make the shapes of parameters symbolic
        for tensor in (self.param, local_of(self.param), self.shard, self.gate):
            if tensor is not None:
                mark_static(tensor)

    def check(self, current: Any) -> None:
        """Raise ValueError if ``current`` is not a DTensor with this parameter's shape, mesh and placement."""
        if not self.layout.fits(current):
            got = (
                f"a DTensor {tuple(current.shape)} {current.placements}"
                if isinstance(current, DTensor)
                else f"a {type(current).__name__}"
            )
            raise ValueError(
                f"compiled_fsdp: parameter {self.name!r} was replaced by {got}; after fully_shard it must stay a DTensor of {self.layout} on the "
                "same mesh. Assign before fully_shard, or load the value with torch.distributed.checkpoint.state_dict.set_model_state_dict."
            )

    def is_current(self) -> bool:
        """Whether the DTensor's memory is still the shard's: ``torch.utils.swap_tensors`` and the like change it silently."""
        local = local_of(self.param)
        if self.rows == 0:  # a tensor without elements has no pointer of its own
            return local.untyped_storage().data_ptr() == self.shard.untyped_storage().data_ptr()
        return local.data_ptr() == self.shard.data_ptr()

    @never_compiled
    def replace(self, param: nn.Parameter) -> None:
        """Follow an assignment to one of its places; a tied parameter stays one."""
        for module, attribute in self.live_places():
            if stored(module, attribute) is not None:  # else set to None or deleted there
                module._parameters[attribute] = param
        self.refresh()

    @never_compiled  # called by a hook in eager code, below a compiled call
    def refresh(self) -> None:
        """Follow a parameter that was moved, cast, loaded with ``assign``, swapped or replaced. Raises as ``check``."""
        held = (stored(module, attribute) for module, attribute in self.live_places())
        current: Any = next((param for param in held if param is not None), None)
        if current is None:
            return
        self.check(current)
        self.param = cast(nn.Parameter, current)
        BOUNDARY.drop([self.param])  # perhaps loaded in place
        local = local_of(current)
        if self.offload is not None and local.device.type not in ("cpu", "meta"):
            raise RuntimeError(
                f"FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state dict or call "
                f"module.to_empty(device='cpu'). {self.name!r} is on {local.device}."
            )
        if _same_memory(local, self._own()):
            return
        if self.shard.dtype != local.dtype:
            self._recast(local.dtype)
        with torch.no_grad():
            if self.rows == self.shard.shape[self.dim] and local.is_contiguous():
                self._adopt(local.detach())
            else:
                shard = local.new_zeros(self.shard.shape)
                shard.narrow(self.dim, 0, self.rows).copy_(local)
                self._adopt(shard)
                set_local(current, self._own())
        self.unit.regroup()
        self._mark()

    def _recast(self, dtype: torch.dtype) -> None:
        """Follow ``.to(dtype)``: what has no dtype by policy goes with the parameter."""
        self.dtype, self.reduce_dtype = self.policy.of(dtype)
        self.unit.set_reductions()

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
        """The full parameter inside a forward of its unit: gathered once a forward (or recomputation)."""
        return self.layout.in_forward(self.read_local())

    def read_local(self) -> torch.Tensor:
        """The same before tensor parallelism makes a DTensor of it: ``size``."""
        if self.shard.is_meta:
            self.unit.raise_meta()
        unit = self.unit
        tied = unit.tied
        if tied is not None and self.number in tied:
            return tied[self.number]
        if torch.compiler.is_compiling():
            if unit.depth == 0 and unit.kept is None:
                unit.in_parts = True  # a constant: traced code sets it without a guard
            if unit.kept is not None:
                return ops.read_full(unit.kept[self.number], *self._full_arguments())
            if unit.holds and self.retained is not None:
                return ops.read_full(self.retained, *self._full_arguments())
            return self._read_and_retain() if unit.retains else self._unshard(unit.keep)
        kept = unit.kept_now()
        full = kept[self.number] if kept is not None else self.retained if unit.holds else None
        if full is not None and unit.depth == 0:  # unsharded, and read outside of a forward
            return read_full(full, self._full_arguments())
        return read_eagerly(self, unit.gathered(), full)

    def _read_and_retain(self) -> torch.Tensor:
        full = self._unshard(True)
        with torch.no_grad():
            self.retained = ops.retain(full)
        return full

    def _gate(self) -> torch.Tensor | None:
        if not self.param.requires_grad:
            return None
        sync = self.unit.sync
        return self.gate if sync == ALL else self.waiting_gate if sync == NONE else self.scattered_gate

    def _unshard(self, keep: bool) -> torch.Tensor:
        return ops.unshard(
            self.shard, self._gate(), self.slot, self.size, self.world, self.label, self.dim, self.block_size, self.position,
            keep, self.dtype, self.reduction, self.unit.again, -1, self.compute_device,
        )  # fmt: skip

    def read_for_backward(self) -> torch.Tensor:
        """The full parameter, ``size``, in compiled autograd's graph, where eager code has read it in forward."""
        return self._unshard(keep=False)

    def gate_now(self) -> torch.Tensor:
        """What the gradient of a read flows to."""
        gate = self._gate()
        assert gate is not None
        return gate

    def reduce_arguments(self) -> tuple[Any, ...]:
        """Arguments of ``reduce_grad`` from ``shard_size`` on."""
        device = self.shard.device if self.offload is not None else None
        return list(self.shard.shape), self.world, self.label, self.dim, self.shard.dtype, self.reduction, -1, device

    def _full_arguments(self) -> tuple[Any, ...]:
        return (
            self._gate(), self.slot, tuple(self.shard.shape), self.world, self.label, self.dim, self.block_size, self.position,
            self.shard.dtype, self.reduction, -1, self.shard.device if self.offload is not None else None,
        )  # fmt: skip

    # ---- backward ----------------------------------------------------------------------------------------------------
    def publish(self, grad: torch.Tensor, owned: bool = False) -> None:
        """``add`` the shard's reduced gradient, and run the post-accumulate-grad hooks."""
        self.add(grad, owned)
        self.run_hooks()

    def add(self, grad: torch.Tensor, owned: bool = False) -> None:
        """Add the shard's reduced gradient (padded shape) to ``.grad``.

        ``grad`` is copied unless its memory is ``owned``: a compiled backward may use its own again.
        """
        param = self.param
        self.unit.after_backward(self)
        with torch.no_grad():
            rows = grad.narrow(self.dim, 0, self.rows)
            if param.grad is None:
                param.grad = dtensor_like(param, rows if owned else rows.clone(memory_format=torch.contiguous_format))
            else:
                local_of(param.grad).add_(rows)

    def run_hooks(self) -> None:
        """Run the post-accumulate-grad hooks: all of ``.grad`` is there."""
        param = self.param
        hooks = post_accumulate_grad_hooks(param)
        if hooks:
            BOUNDARY.drop([param])  # a hook may update it
        for hook in hooks:
            hook(param)


for _function in (
    ShardedParameter.read, ShardedParameter.read_local, ShardedParameter._unshard, ShardedParameter._read_and_retain,
    ShardedParameter._gate, ShardedParameter._full_arguments, ShardedParameter.publish, ShardedParameter.add,
    ShardedParameter.run_hooks, ShardedParameter.is_current,
    ShardedParameter.check, Layout.in_forward, Layout.fits, dtensor_like, local_of,
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
