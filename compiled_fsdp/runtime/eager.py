"""Reads in eager code: a bucket for each repeated block, not held from forward to backward.

The first read of a block's parameter gathers the whole block, through the same door as compiled graphs (``boundary.py``). What
autograd saves of the full parameters is replaced by a note which and how (``Saving``), and gathered again when backward asks;
the last note of a forward that is used up frees it. Gradients are collected until all of the block's are there, and
reduced in one bucket (``publishing.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_fsdp import ops
from compiled_fsdp.compat import (
    at_end_of_backward,
    never_a_frame_of_its_own,
    never_compiled,
    outside_inference_mode,
    pop_saving_hooks,
    push_saving_hooks,
    saving_hooks,
    storage_pointer,
)
from compiled_fsdp.runtime.publishing import PUBLISHING

if TYPE_CHECKING:
    from compiled_fsdp.parameter import ShardedParameter


class Block:
    """A block's parameters in full, for one forward (or one recomputation of a part of it).

    Attributes:
        parameters: of one block and dtype, in registration order.
        reads: the numbers of slots that were read for training.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters = list(parameters)
        self.reads: set[int] = set()
        self._full: list[Tensor] | None = None
        self._fulls_of_forward: list[Tensor] | None = self._gathered()

    def full(self, parameter: ShardedParameter) -> Tensor:
        """The full parameter while the forward runs."""
        assert self._fulls_of_forward is not None
        return self._fulls_of_forward[self.parameters.index(parameter)]

    def close(self) -> None:
        """The forward is over."""
        self._fulls_of_forward = None

    def again(self, index: int) -> Tensor:
        """The full parameter while the backward runs, gathered anew."""
        if self._fulls_of_forward is not None:  # backward runs inside of the forward
            return self._fulls_of_forward[index]
        if self._full is None:
            at_end_of_backward(self._drop)  # where notes outlive the backward (retain_graph)
            self._full = self._gathered()
        return self._full[index]

    def _drop(self) -> None:
        self._full = None

    def _gathered(self) -> list[Tensor]:
        parameters = self.parameters
        sizes = [size for parameter in parameters for size in parameter.size]
        with torch.no_grad(), outside_inference_mode():
            fulls = ops.gather_full(
                [p.shard for p in parameters], [p.slot for p in parameters], sizes, parameters[0].world
            )
        for index, full in enumerate(fulls):
            SAVING.know(full, self, index)
        return fulls


class ReadEagerly(torch.autograd.Function):
    """A full parameter that was gathered with its block; its gradient goes into the block's bucket."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, gate: Tensor, parameter: ShardedParameter, block: Block) -> Tensor:
        ctx.parameter, ctx.block = weakref.ref(parameter), block
        ctx.slot, ctx.reduce = (
            parameter.slot,
            (list(parameter.shard.shape), parameter.world, parameter.label, parameter.dim),
        )
        # not a view, which a module could not write to (Embedding's max_norm)
        return full.new_empty(0).set_(full.untyped_storage(), full.storage_offset(), full.shape, full.stride())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ops.refuse_sparse(grad)
        parameter = ctx.parameter()
        # compiled autograd; create_graph=True; no communication
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or parameter.world == 1:
            return None, ops.reduce_grad(grad, ctx.slot, *ctx.reduce), None, None
        return None, PUBLISHING.collect(grad, parameter, ctx.block), None, None


never_a_frame_of_its_own(ReadEagerly.backward)


@never_compiled
def read(parameter: ShardedParameter, cache: dict[Any, Any]) -> Tensor:
    """The full parameter in eager code. ``cache`` holds the running forward's blocks.

    Of repeated blocks only the last one stays full: they run one after the other.
    """
    unit = parameter.unit
    key = (parameter.block, parameter.shard.dtype)
    block: Block | None = cache.get(key)
    if block is None:
        if parameter.block > 0:
            for other in [other for other in cache if other[0] not in (0, parameter.block)]:
                cache.pop(other).close()
        members = [p for p in unit.parameters if p.block == parameter.block and p.shard.dtype == parameter.shard.dtype]
        block = cache[key] = Block(members)
    full = block.full(parameter)
    if not (torch.is_grad_enabled() and parameter.param.requires_grad):
        return full
    block.reads.add(parameter.slot_number)
    if not unit.keep:
        SAVING.start()
    return ReadEagerly.apply(full, parameter.gate, parameter, block)


# ---- what autograd saves ---------------------------------------------------------------------------------------------
class _Note:
    """In place of a saved tensor: a view of a block's full parameter."""

    def __init__(self, block: Block, index: int, tensor: Tensor) -> None:
        self.block, self.index = block, index
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        return self.block.again(self.index).as_strided(self.size, self.stride, self.offset)


class Saving:
    """Default hooks for saved tensors, from the first eager read to the next compiled graph or the end of a unit's forward.

    Where somebody else's hooks are active (checkpointing, ``save_on_cpu``) they stay alone: it is theirs to say what is saved.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Block], int]] = {}
        self._hooks = (self._pack, self._unpack)
        self._active = False

    def know(self, full: Tensor, block: Block, index: int) -> None:
        """Views of ``full`` are not to be saved, as long as it lives."""
        pointer = full.untyped_storage().data_ptr()
        known = self._known
        known[pointer] = weakref.ref(full, lambda _: known.pop(pointer, None)), weakref.ref(block), index

    def start(self) -> None:
        if saving_hooks() is None:
            push_saving_hooks(*self._hooks)
            self._active = True

    def stop(self) -> None:
        if self._active:
            hooks = saving_hooks()
            if hooks is not None and hooks[0] == self._hooks[0]:
                pop_saving_hooks()
                self._active = False

    def _pack(self, tensor: Tensor) -> Any:
        found = self._known.get(storage_pointer(tensor))
        if found is None:
            return tensor
        full, block = found[0](), found[1]()
        if full is None or block is None or tensor.dtype != full.dtype:
            return tensor
        return _Note(block, found[2], tensor)

    def _unpack(self, packed: Any) -> Tensor:
        return packed.tensor() if isinstance(packed, _Note) else packed


SAVING = Saving()
