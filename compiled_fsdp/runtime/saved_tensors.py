"""What autograd saves of full parameters in eager code: a reference that says which and how, in place of the memory."""

# Why: docs/design.md, note N29

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

from compiled_fsdp.compat import (
    local_of,
    never_compiled,
    pop_saving_hooks,
    push_saving_hooks,
    saving_hooks,
    skip_as_frame,
    storage_pointer,
)
from compiled_fsdp.state.unit import Unit


class GathersAgain(Protocol):
    """Who gathers parameters once more for a backward; weakly referenced while nothing is saved of them."""

    def full_in_backward(self, index: int) -> Tensor:
        """The full parameter."""


class SavedParamRef:
    """In place of a saved tensor: a view of a full parameter."""

    def __init__(self, block: GathersAgain, index: int, full: Tensor, tensor: Tensor,
                 like: tuple[Any, ...] | None) -> None:  # fmt: skip
        self.block, self.index = block, index
        # Of tensor parallelism's: mesh, placements, shape, stride.
        self.like = like
        self.contiguous = full.stride()
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset() - full.storage_offset()

    @skip_as_frame
    def tensor(self) -> Tensor:
        """What was saved."""
        local = self._local()
        if self.like is None:
            return local
        mesh, placements, shape, stride = self.like
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    @skip_as_frame
    def _local(self) -> Tensor:
        """A view of the full parameter."""
        full = self.block.full_in_backward(self.index)
        if self.size == full.shape and self.stride == self.contiguous:
            return full
        if len(self.size) == 2 and self.stride == self.contiguous[::-1] and self.size == full.shape[::-1]:
            return full.t()
        # a copy: in a graph the full parameter may be a view of a bucket
        return full.contiguous().clone().as_strided(self.size, self.stride, self.offset)


def _as_saved(tensor: Tensor) -> Tensor:
    """What is kept of a tensor that is saved as it is.

    A node's own result refers to the node, and would keep it for ever where no backward comes: nobody sees the cycle.
    Autograd itself knows where the result belongs.
    """
    return tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()


class SavedTensors:
    """Default hooks for saved tensors, from the first eager read to the next compiled graph or the end of a forward.

    Where somebody else's hooks are active (checkpointing, ``save_on_cpu``) they stay alone: it is theirs to say what is
    saved.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], weakref.ref[GathersAgain], int]] = {}
        self._hooks = (self._pack, self._unpack)
        self._unit: weakref.ref[Unit] | None = None

    @property
    def idle(self) -> bool:
        """Whether the hooks are not active."""
        return self._unit is None

    def register(self, full: Tensor, block: GathersAgain, index: int) -> None:
        """Views of ``full`` are not to be saved, as long as it lives."""
        pointer = full.untyped_storage().data_ptr()
        known = self._known
        known[pointer] = weakref.ref(full, lambda _: known.pop(pointer, None)), weakref.ref(block), index

    def start(self, unit: Unit) -> None:
        """From here on; until ``unit``'s forward ends at the latest."""
        if saving_hooks() is None:
            push_saving_hooks(*self._hooks)
            self._unit = weakref.ref(unit)

    @never_compiled
    def stop(self, unit: Unit | None = None) -> None:
        """Stop, or only if it was ``unit`` that started."""
        if self._unit is not None and (unit is None or self._unit() is unit):
            hooks = saving_hooks()
            if hooks is not None and hooks[0] == self._hooks[0]:
                pop_saving_hooks()
                self._unit = None

    @never_compiled  # autograd calls it, below whatever runs
    def _pack(self, tensor: Tensor) -> Any:
        local, like = tensor, None
        if isinstance(tensor, DTensor):
            local, like = local_of(tensor), (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        found = self._known.get(storage_pointer(local))
        full, block = (None, None) if found is None else (found[0](), found[1]())
        if found is None or full is None or block is None or local.dtype != full.dtype:
            return _as_saved(tensor)
        return SavedParamRef(block, found[2], full, local, like)

    @skip_as_frame  # compiled autograd traces it
    def _unpack(self, packed: Any) -> Tensor:
        return packed.tensor() if isinstance(packed, SavedParamRef) else packed
