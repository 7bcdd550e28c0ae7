"""Reads in eager code: they gather a whole repeated block, and do not hold it from forward to backward.

The first read of a block's parameter gathers the block in one bucket, through the prefetcher, as compiled graphs do
(``runtime/prefetcher.py``). Autograd saves references instead of full parameters: a reference says which parameter it
means and which view of it (``runtime/saved_tensors.py``). Backward gathers the block again when it needs a reference's
tensor, and frees it with the last reference. The block's gradients are collected until all have come, and reduced in
one bucket (``runtime/reducer.py``).
"""

# Why: docs/design/graph-breaks.md, "Eager code saves references"

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets.reduction import GradSync
from compiled_fsdp.buckets.spec import ReadSpec
from compiled_fsdp.compat.autograd import (
    at_end_of_backward,
    backward_id,
    in_checkpoint,
    next_sequence_number,
    outside_of_transforms,
    running_node,
)
from compiled_fsdp.compat.dynamo import compiling_is_on, never_compiled
from compiled_fsdp.compat.graphs import fake_mode_is_active
from compiled_fsdp.compat.modules import tree_flatten
from compiled_fsdp.frontend.wrapped_reads import gather_in_graph
from compiled_fsdp.ops import calls
from compiled_fsdp.ops.autograd import Attach, grad_for_gate, refuse_sparse
from compiled_fsdp.runtime.backward_state import ExpectedGrads
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.runtime.frozen_reads import FrozenRead
from compiled_fsdp.runtime.pieces import as_plain
from compiled_fsdp.state.eager_forward import ForwardReads
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import may_retain, parameter_of, unit_of
from compiled_fsdp.state.unit import Unit


class BlockHandle:
    """A block's parameters, which a backward gathers in full for as long as a saved reference needs them.

    ``EagerBlock`` and saved references keep the handle alive. The handle keeps nothing of the forward alive.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], unit: Unit) -> None:
        self.parameters = list(parameters)
        # The block in its forward, while that runs.
        self.block: weakref.ref[EagerBlock] | None = None
        self.unit = unit
        # Whether all ranks meet before the block's first read, because other ranks may have compiled code for it. For
        # example, compiled code on this rank has called the code that reads the block.
        self.meets = False
        # This block's record for the forward's backward, if none of its parameters trains.
        self.frozen: FrozenRead | None = None
        # The full parameters that a backward has gathered, by index, and that backward's number; -1: none.
        self._fulls: dict[int, Tensor] = {}
        self._backward = -1

    def full_in_backward(self, index: int) -> Tensor:
        """The full parameter with this index while a backward runs, gathered again."""
        if torch.compiler.is_compiling():  # compiled autograd: a read like any other
            if self.parameters[index].wrapped:
                return gather_in_graph(self.parameters[index], False)
            return calls.unshard(self.parameters[index], False, 0)  # 0: eager code leaves no pieces for fewer ranks
        return self._gathered_again(index)

    @never_compiled
    def _gathered_again(self, index: int) -> Tensor:
        block = self.block() if self.block is not None else None
        if block is not None and index in block.fulls:  # the backward runs inside of the forward
            return block.fulls[index]
        if backward_id() == -1:
            raise RuntimeError(
                f"compiled_fsdp: {self.parameters[index].name!r}, which autograd has saved for backward, was read "
                "outside of a backward. The full parameter is not kept from forward to backward; shard with "
                "reshard_after_forward=False to keep it."
            )
        if self._backward != backward_id():
            # because references may outlive the backward (retain_graph=True)
            at_end_of_backward(partial(_end_backward, weakref.ref(self)))
            self._fulls, self._backward = {}, backward_id()
        if index not in self._fulls:
            self._fulls |= self.gather(index)
        return self._fulls[index]

    def drop(self) -> None:
        """Drop the full parameters that a backward has gathered."""
        self._fulls = {}

    def gather(self, index: int) -> dict[int, Tensor]:
        """Gather the full parameter with this index. A collective call.

        Returns: full parameters by index: this one if a plan is followed, otherwise all of the block.
        """
        RUNTIME.reducer.pass_frozen()
        parameter, kind = self.parameters[index], "training" if torch.is_grad_enabled() else "inference"
        in_plans = parameter.world > 1 and not parameter.wrapped
        full = RUNTIME.follower.full(parameter, kind, meets=self.meets) if in_plans else None
        if full is not None:
            fulls = {index: full}
        else:
            if backward_id() != -1:
                RUNTIME.reducer.gathers_again(self.parameters)
                self.unit.eager.gathered_again.add(self.parameters[0].bucket_key)
            else:
                self._note_if_frozen()
                if in_plans and self.meets:
                    RUNTIME.follower.note_block(self.parameters, kind)
            fulls = dict(enumerate(calls.gather_full(self.parameters)))
        for number, full in fulls.items():
            parameter = self.parameters[number]
            # if the followed plan does not gather the parameter again in backward, autograd saves it as it is
            if not self.is_kept and RUNTIME.follower.backwards.gathers_in_backward(parameter):
                RUNTIME.saved_tensors.register(full, self, number, parameter.held_tensors())
        return fulls

    @property
    def is_kept(self) -> bool:
        """Whether the full parameters that backward needs stay in memory from forward on."""
        return self.unit.keep_for_backward or (self.frozen is not None and self.frozen.is_kept)

    def _note_if_frozen(self) -> None:
        """Record that a forward gathers the block, if no parameter of it trains.

        By this record all ranks gather the block again in backward, or none does (``runtime/frozen_reads.py``).
        """
        root, first = self.unit.root, self.parameters[0]
        reads = root.eager.frozen
        if reads is None or self.frozen is not None or any(p.param.requires_grad for p in self.parameters):
            return
        if first.world == 1 or self.unit.mode_of(first) != "resharded" or fake_mode_is_active():
            return
        if reads:
            decisions = next(iter(reads.values())).decisions
        else:  # decided anew for each set of trained parameters, because that changes which blocks backward needs
            trained = tuple(p.param.requires_grad for unit in root.tree_units() for p in unit.parameters)
            decisions = root.eager.frozen_decisions.setdefault(trained, {})
        key = next(key for number in itertools.count() if (key := (first.param_id, number)) not in reads)
        gather = partial(calls.gather_full, self.parameters)
        self.frozen = reads[key] = FrozenRead(self.parameters, gather, next_sequence_number(), key, decisions)


def _end_backward(reference: weakref.ref[BlockHandle]) -> None:
    if (handle := reference()) is not None:
        handle.drop()


class EagerBlock:
    """A block in the running forward, or in a part of a forward that backward runs again."""

    def __init__(self, parameters: Sequence[ShardedParameter], unit: Unit) -> None:
        self.handle = BlockHandle(parameters, unit)
        self.handle.block = weakref.ref(self)
        resharded = parameters[0].world > 1 and unit.mode_of(parameters[0]) == "resharded"
        self.expected = ExpectedGrads(weakref.ref(self.handle), resharded)
        # The full parameters by index; empty once another block runs.
        self.fulls: dict[int, Tensor] = {}
        # eager code leaves no parts for fewer ranks
        self._retains = unit.retain_across_microbatches and not unit.ranks_of_parts and torch.is_grad_enabled()
        self._reads: dict[int, Tensor] = {}
        self._was_freed = False

    def full(self, parameter: ShardedParameter) -> Tensor:
        """The full parameter, without autograd; the first call gathers it."""
        index = self.handle.parameters.index(parameter)
        if index not in self.fulls:
            kept = None if backward_id() == -1 else self.handle.unit.eager.kept_full(parameter.param_id)
            gathered = self.handle.gather(index) if kept is None else {index: kept}
            self.fulls |= gathered
            for number, full in gathered.items() if self._retains else ():
                self.handle.parameters[number].retained = full
        if self.handle.frozen is not None:
            self.handle.frozen.number = next_sequence_number()
        self._keep(parameter, self.fulls[index])
        return self.fulls[index]

    def _keep(self, parameter: ShardedParameter, full: Tensor) -> None:
        """Keep a full parameter for a checkpoint, if its unit stays full until backward.

        The checkpoint does not save the parameter and reads it again in backward. It must not gather it there, because
        ranks without the checkpoint do not.
        """
        unit = self.handle.unit
        is_checkpoint = in_checkpoint() or not torch.is_grad_enabled()  # gradients are off in a reentrant checkpoint
        if is_checkpoint and self.handle.is_kept and unit.eager.trains and backward_id() == -1:
            unit.eager.kept[parameter.param_id] = full

    def read(self, parameter: ShardedParameter, full: Tensor | None = None) -> Tensor:
        """The full parameter with autograd. Until ``free`` it is the same tensor, so that autograd sums its gradients.

        Args:
            parameter: one of the block.
            full: the full parameter if it is there already; None to gather it.
        """
        if parameter.param_id not in self._reads:
            needs_no_gather = full is not None or parameter.world == 1
            if needs_no_gather and parameter.group.ranks_in_all > 1 and not parameter.wrapped:
                # because its gradient may be in a bucket of a followed plan
                RUNTIME.follower.note_full(parameter, "training", meets=self.handle.meets, full=full)
            full = self.full(parameter) if full is None else full
            if not RUNTIME.follower.backwards.follows(parameter):  # else its gradient goes into the plan's bucket
                self.expected.count += 1
            RUNTIME.follower.expect_gradient(parameter)
            collect = partial(_collect, parameter.param_id, self.expected)
            gate, param_id = parameter.active_gate, parameter.id_tensor
            read = Attach.apply(full, gate, param_id, parameter.read_text, -1, collect)
            self._reads[parameter.param_id] = read
        return self._reads[parameter.param_id]

    def only_reads(self) -> dict[int, Tensor]:
        """The tensors with which a forward has computed in all uses of a parameter, by ``param_id``.

        A freed block has none, because its parameters are other tensors when they are read again. A tensor-parallel
        parameter has none, because each read makes another DTensor.
        """
        if self._was_freed:
            return {}
        known = (parameter.param_id for parameter in self.handle.parameters if not parameter.tensor_parallel)
        return {param_id: self._reads[param_id] for param_id in known if param_id in self._reads}

    def free(self) -> None:
        """Drop the full parameters, because another block runs."""
        self.fulls = {}
        self._reads.clear()
        self._was_freed = True


def _collect(number: int, expected: ExpectedGrads, ctx: Any, grad: Tensor) -> Tensor:
    """Put the gradient of a full parameter, which was gathered with its block, into the block's bucket.

    Args:
        number: the ``param_id``; not the parameter itself, because a read must not keep the model alive.
        expected: the gradients that the block's reads bring.
        ctx: the context of the read's autograd node.
        grad: the gradient of the full parameter.

    Returns: the gradient for the parameter's gate.
    """
    parameter = parameter_of(number)
    spec = ReadSpec.parse(ctx.spec_text).reduction
    # with any_dtype the engine would cast the gradient to the gate's dtype
    alone = parameter.group.ranks_in_all == 1 and not spec.any_dtype
    if alone and spec.sync is not GradSync.NONE:  # no communication
        return grad_for_gate(ctx, grad)
    refuse_sparse(grad)
    _gather_as_other_ranks(parameter, expected)
    if spec.sync is GradSync.NONE:
        RUNTIME.reducer.accumulate_unreduced(as_plain(grad), parameter, follows=True)
        return grad.new_zeros((), dtype=torch.float32)
    return RUNTIME.reducer.collect(as_plain(grad), parameter, spec, expected)


@never_compiled
def _gather_as_other_ranks(parameter: ShardedParameter, expected: ExpectedGrads) -> None:
    """Gather a block again before its first gradient is handed in, if this backward has not done so.

    Whether a backward needs the full parameters depends on this rank's code. For example, a checkpoint reads all of
    them, but an added bias needs none. So that ranks launch the same gathers, every rank gathers each block that is
    resharded after forward, as with FSDP2.
    """
    if expected.backward == backward_id():
        return
    expected.backward = backward_id()
    if not expected.resharded or fake_mode_is_active() or RUNTIME.follower.backwards.follows(parameter):
        return
    unit, key = unit_of(parameter), parameter.bucket_key
    if key not in unit.eager.gathered_again:
        handle = expected.handle() or BlockHandle(unit.params_by_bucket()[key], unit)
        handle.full_in_backward(handle.parameters.index(parameter))
    unit.eager.gathered_again.discard(key)


def read_eagerly(parameter: ShardedParameter, unit: Unit, full: Tensor | None = None) -> Tensor:
    """The full parameter in eager code; ``full`` is the gathered one if it is there already.

    Only the last of several repeated blocks stays full, because they run one after the other.
    """
    return _read_eagerly(parameter, unit, full, compiling_is_on())


@never_compiled
def _read_eagerly(parameter: ShardedParameter, unit: Unit, full: Tensor | None, below_compile: bool) -> Tensor:
    blocks = _blocks_of(unit)
    key = parameter.bucket_key
    if key not in blocks:
        blocks[key] = EagerBlock(unit.params_by_bucket()[key], unit)
    if parameter.block > 0:
        for other_key, other in blocks.items():
            if other_key[0] not in (0, parameter.block):
                other.free()
    block = blocks[key]
    # ``below_compile`` is False in code that Dynamo was told to leave alone (``torch.compiler.disable``, torch's
    # checkpoint), even if compiled code has called it. So the root's forward is asked, too.
    block.handle.meets = below_compile or unit.root.eager.below_compile or RUNTIME.follower.known.has_any_of(unit.root)
    if torch.is_grad_enabled() and full is None and not unit.keep_for_backward:
        RUNTIME.saved_tensors.start(unit)
    with outside_of_transforms():  # code under torch.func's transforms and other code share a read
        if torch.is_grad_enabled() and parameter.param.requires_grad:
            return block.read(parameter, full)
        if parameter.param.requires_grad and unit.depth > 0 and unit.eager.trains:
            unit.eager.may_run_again = True  # it may be the forward of a reentrant checkpoint
        return block.full(parameter) if full is None else full


def _blocks_of(unit: Unit) -> dict[Any, EagerBlock]:
    """The blocks of the running forward, or of the part that backward runs again; the caller adds to them."""
    eager = unit.eager
    if unit.depth == 0 and eager.recomputing is not (node := running_node()):
        # because a recomputation calls no forward hook at its end
        eager.recomputing, eager.blocks = node, None
        at_end_of_backward(unit.end_recomputation)
        eager.in_parts = True
        RUNTIME.reducer.take_part(unit)
    if eager.blocks is None:
        eager.blocks = {}
    return eager.blocks


# ---- at the end of a forward -----------------------------------------------------------------------------------------
@never_compiled
def keep_reads(unit: Unit, output: Any) -> None:
    """At the end of an uncompiled forward: remember the tensors that it has read, while the graph of ``output`` lives.

    Attributes give these tensors until a backward reaches the unit (``read_of_forward``), so that
    ``torch.autograd.grad(loss, module.weight)`` works as with FSDP2.
    """
    eager = unit.eager
    if not ((unit.keep_for_backward or eager.kept) and eager.trains and eager.backward == -1):
        return
    reads = ForwardReads({}, eager.kept)
    for block in (eager.blocks or {}).values() if unit.keep_for_backward and eager.reads is not None else ():
        reads.tensors.update(block.only_reads())
    grad_fns = [leaf.grad_fn for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
    # Without the node of a read, which is an output if, for example, a model returns its head's weight: its metadata
    # would hold the read, and the read holds the node. Python's collector does not see that cycle.
    nodes: list[Any] = [n for n in grad_fns if n is not None and getattr(n, "hands_to_block", None) is None]
    for node in nodes:
        # the graph holds the reads; the unit must not, because it would keep them for ever if no backward comes
        node.metadata[id(unit)] = reads
    if nodes and reads.tensors:
        eager.reads = [known for known in eager.reads or () if known() is not None] + [weakref.ref(reads)]
    if nodes and reads.kept:
        eager.kept_by = [known for known in eager.kept_by if known() is not None] + [weakref.ref(reads)]
        may_retain(unit)


@never_compiled
def read_of_forward(parameter: ShardedParameter, unit: Unit) -> Tensor | None:
    """The full parameter as the last uncompiled forward has read it, if that forward's backward is still to come.

    None if there is no such forward, and if several forwards wait for their backward, because none of their tensors
    gets the whole gradient.
    """
    waiting = [reads for known in unit.eager.reads or () if (reads := known()) is not None]
    return waiting[0].tensors.get(parameter.param_id) if len(waiting) == 1 and backward_id() == -1 else None


@never_compiled
def watch_frozen(unit: Unit, output: Any) -> None:
    """At the end of an uncompiled forward: let a backward from ``output`` gather its frozen blocks as all ranks do."""
    reads, unit.root.eager.frozen = unit.root.eager.frozen, None
    if reads:
        RUNTIME.reducer.watch_frozen(tuple(reads.values()), output)


@never_compiled
def drop_blocks(unit: Unit) -> None:
    """Drop the full parameters that eager code has gathered for the unit."""
    for block in (unit.eager.blocks or {}).values():
        block.free()
    unit.eager.blocks, unit.eager.kept = None, {}
