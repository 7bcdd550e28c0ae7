"""What autograd saves of full parameters in eager code: a reference that says which and how, in place of the memory."""

# Why: docs/design.md, note N29

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

from compiled_fsdp.compat.autograd import (
    is_wrapper,
    local_of,
    pop_saving_hooks,
    push_saving_hooks,
    saving_hooks,
    storage_id,
)
from compiled_fsdp.compat.dynamo import never_compiled
from compiled_fsdp.state.unit import Unit


class GathersAgain(Protocol):
    """Who gathers parameters once more for a backward; weakly referenced while nothing is saved of them."""

    def full_in_backward(self, index: int) -> Tensor:
        """The full parameter."""


@dataclass(frozen=True)
class _Known:
    """A tensor of a full parameter: itself, or one of those that it is made of."""

    tensor: weakref.ref[Tensor]
    block: weakref.ref[GathersAgain]
    # The parameter's in the block.
    index: int
    # Of the attributes that lead to it.
    path: tuple[str, ...]


class SavedParamRef:
    """In place of a saved tensor: a view of a full parameter, or of a tensor that it is made of."""

    def __init__(self, block: GathersAgain, index: int, path: tuple[str, ...], full: Tensor, tensor: Tensor,
                 like: tuple[Any, ...] | None) -> None:  # fmt: skip
        self.block, self.index, self.path = block, index, path
        # Of tensor parallelism's: mesh, placements, shape, stride.
        self.like = like
        self.contiguous = full.stride()
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset() - full.storage_offset()

    def tensor(self) -> Tensor:
        """What was saved."""
        local = self._local()
        if self.like is None:
            return local
        mesh, placements, shape, stride = self.like
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def _local(self) -> Tensor:
        """A view of the full parameter."""
        full = self.block.full_in_backward(self.index)
        for name in self.path:
            full = getattr(full, name)
        if self.size == full.shape and self.stride == self.contiguous:
            return full
        if len(self.size) == 2 and self.stride == self.contiguous[::-1] and self.size == full.shape[::-1]:
            return full.t()
        # a copy: in a graph the full parameter may be a view of a bucket
        return full.contiguous().clone().as_strided(self.size, self.stride, self.offset)


class SavedWrapper:
    """In place of a saved tensor that is made of others: what is saved of those."""

    def __init__(self, tensor: Any, inner: dict[str, Any], context: Any) -> None:
        self.kind, self.inner, self.context = type(tensor), inner, context
        self.size, self.stride = tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        """What was saved."""
        inner = {name: unpacked(packed) for name, packed in self.inner.items()}
        kind: Any = self.kind
        return kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)


def unpacked(packed: Any) -> Tensor:
    """What was saved, of what stands in its place."""
    return packed.tensor() if isinstance(packed, (SavedParamRef, SavedWrapper)) else packed


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
        # By ``storage_id``.
        self._known: dict[int, _Known] = {}
        self._hooks = (self._pack, unpacked)
        self._unit: weakref.ref[Unit] | None = None

    @property
    def idle(self) -> bool:
        """Whether the hooks are not active."""
        return self._unit is None

    def register(self, full: Tensor, block: GathersAgain, index: int, held: Iterable[Tensor] = ()) -> None:
        """Views of ``full``, or of the tensors that it is made of, are not to be saved, as long as it lives.

        ``held``: tensors that are there all the time, of which it may be made, too; their views are saved.
        """
        not_ours = {0, *map(storage_id, held)}
        for path, tensor in _parts(full):
            memory = storage_id(tensor)
            known = self._known.get(memory)
            place = known and (known.index, known.path, known.block())
            if known is not None and known.tensor() is not None and place != (index, path, block):
                not_ours.add(memory)  # two parameters are made of it
            if memory in not_ours:
                self._forget(memory, None)
                continue
            reference = weakref.ref(tensor, partial(self._forget, memory))
            self._known[memory] = _Known(reference, weakref.ref(block), index, path)

    def _forget(self, memory: int, _: Any) -> None:
        self._known.pop(memory, None)

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
        elif is_wrapper(tensor):
            return self._pack_wrapper(tensor)
        found = self._known.get(storage_id(local))
        if found is None:
            return _as_saved(tensor)
        full, block = found.tensor(), found.block()
        if full is None or block is None or local.dtype != full.dtype:
            return _as_saved(tensor)
        return SavedParamRef(block, found.index, found.path, full, local, like)

    def _pack_wrapper(self, tensor: Any) -> Any:
        names, context = tensor.__tensor_flatten__()
        inner = {name: self._pack(getattr(tensor, name)) for name in names}
        if not any(isinstance(packed, (SavedParamRef, SavedWrapper)) for packed in inner.values()):
            return _as_saved(tensor)
        return SavedWrapper(tensor, inner, context)


def _parts(full: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The plain tensors that a full parameter is made of, each with the attributes that lead to it."""
    if not is_wrapper(full):
        yield path, full
        return
    for name in full.__tensor_flatten__()[0]:
        yield from _parts(getattr(full, name), (*path, name))
