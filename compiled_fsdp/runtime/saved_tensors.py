"""Saved-tensor hooks for eager code: autograd saves references to full parameters instead of their memory."""

# Why: docs/design/graph-breaks.md, "Eager code saves references"

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
    """An object that gathers parameters again for a backward. References that autograd saves keep it alive."""

    def full_in_backward(self, index: int) -> Tensor:
        """The full parameter."""


@dataclass(frozen=True)
class _Known:
    """A full parameter, or one of its inner tensors if it is a wrapper subclass."""

    tensor: weakref.ref[Tensor]
    block: weakref.ref[GathersAgain]
    # The parameter's index in the block.
    index: int
    # The names of the attributes that lead from the parameter to ``tensor``.
    path: tuple[str, ...]


class SavedParamRef:
    """The saved form of a view of a full parameter, or of one of its inner tensors: a reference."""

    def __init__(self, block: GathersAgain, index: int, path: tuple[str, ...], full: Tensor, tensor: Tensor,
                 like: tuple[Any, ...] | None) -> None:  # fmt: skip
        self.block, self.index, self.path = block, index, path
        # For a DTensor of tensor parallelism its mesh, placements, shape and stride; else None.
        self.like = like
        self.contiguous = full.stride()
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset() - full.storage_offset()

    def tensor(self) -> Tensor:
        """Restore the saved tensor."""
        local = self._local()
        if self.like is None:
            return local
        mesh, placements, shape, stride = self.like
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def _local(self) -> Tensor:
        """The saved view, made from the full parameter that backward has gathered."""
        full = self.block.full_in_backward(self.index)
        for name in self.path:
            full = getattr(full, name)
        if self.size == full.shape and self.stride == self.contiguous:
            return full
        if len(self.size) == 2 and self.stride == self.contiguous[::-1] and self.size == full.shape[::-1]:
            return full.t()
        # from a copy, because in a graph the full parameter may be a view of a bucket
        return full.contiguous().clone().as_strided(self.size, self.stride, self.offset)


class SavedWrapper:
    """The saved form of a wrapper subclass: the saved forms of its inner tensors."""

    def __init__(self, tensor: Any, inner: dict[str, Any], context: Any) -> None:
        self.kind, self.inner, self.context = type(tensor), inner, context
        self.size, self.stride = tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        """Restore the saved tensor."""
        inner = {name: unpacked(packed) for name, packed in self.inner.items()}
        kind: Any = self.kind
        return kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)


def unpacked(packed: Any) -> Tensor:
    """Restore a saved tensor from its saved form, which may be the tensor itself."""
    return packed.tensor() if isinstance(packed, (SavedParamRef, SavedWrapper)) else packed


def _as_saved(tensor: Tensor) -> Tensor:
    """The saved form of a tensor that is no view of a full parameter: the tensor without its autograd node.

    A node's result refers to the node. If no backward came, it would keep the node alive for ever, because Python's
    garbage collector does not see this cycle. Autograd knows the node of a saved result by itself.
    """
    return tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()


class SavedTensors:
    """Default saved-tensor hooks, active from the first eager read to the next compiled graph or the forward's end.

    If other hooks are active (checkpointing, ``save_on_cpu``), these stay inactive, because the other hooks decide how
    tensors are saved.
    """

    def __init__(self) -> None:
        # The tensors of full parameters, by ``storage_id``.
        self._known: dict[int, _Known] = {}
        self._hooks = (self._pack, unpacked)
        self._unit: weakref.ref[Unit] | None = None

    @property
    def idle(self) -> bool:
        """Whether the hooks are not active."""
        return self._unit is None

    def register(self, full: Tensor, block: GathersAgain, index: int, held: Iterable[Tensor] = ()) -> None:
        """Save references for all views of ``full`` and of its inner tensors, as long as it lives.

        ``held``: tensors that are always in memory. If one of them is an inner tensor of ``full``, its views are saved.
        """
        not_ours = {0, *map(storage_id, held)}
        for path, tensor in _parts(full):
            memory = storage_id(tensor)
            known = self._known.get(memory)
            place = known and (known.index, known.path, known.block())
            if known is not None and known.tensor() is not None and place != (index, path, block):
                not_ours.add(memory)  # two parameters share it
            if memory in not_ours:
                self._forget(memory, None)
                continue
            reference = weakref.ref(tensor, partial(self._forget, memory))
            self._known[memory] = _Known(reference, weakref.ref(block), index, path)

    def _forget(self, memory: int, _: Any) -> None:
        self._known.pop(memory, None)

    def start(self, unit: Unit) -> None:
        """Activate the hooks, until ``unit``'s forward ends at the latest, unless other hooks are active."""
        if saving_hooks() is None:
            push_saving_hooks(*self._hooks)
            self._unit = weakref.ref(unit)

    @never_compiled
    def stop(self, unit: Unit | None = None) -> None:
        """Deactivate the hooks; if ``unit`` is given, only if that unit has activated them."""
        if self._unit is not None and (unit is None or self._unit() is unit):
            hooks = saving_hooks()
            if hooks is not None and hooks[0] == self._hooks[0]:
                pop_saving_hooks()
                self._unit = None

    @never_compiled  # autograd calls it, perhaps below compiled code
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
    """The plain tensors that a full parameter is made of, each with the names of the attributes that lead to it."""
    if not is_wrapper(full):
        yield path, full
        return
    for name in full.__tensor_flatten__()[0]:
        yield from _parts(getattr(full, name), (*path, name))
