"""A unit as data: the parameters of one ``fully_shard`` call, the user's switches, and whether they are sharded now.

More than 400 lines: one object holds every state that a unit can be in, so that they cannot contradict each other.
"""

# Why: docs/design/reads.md, "Only root units are divided into blocks"

from __future__ import annotations

import enum
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import UnshardHandle

from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec, divide_factors
from compiled_fsdp.compat.dynamo import mark_static
from compiled_fsdp.compat.nested_regions import keep_writes_after_bodies, notes_of_bodies
from compiled_fsdp.compat.tracing import TracedObject
from compiled_fsdp.sharding.blocks import repeated_blocks
from compiled_fsdp.sharding.process_groups import ShardGroup
from compiled_fsdp.state.comm_policy import CommPolicy
from compiled_fsdp.state.eager_forward import EagerForward
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.prefetch_lists import PrefetchLists


class ShardState(enum.Enum):
    """Whether a unit's parameters are sharded or full outside of its forwards."""

    SHARDED = enum.auto()
    # ``unshard()`` has launched gathers, and nobody has waited for them yet.
    UNSHARDING = enum.auto()
    # The gathers of ``unshard()`` are done: a read gives a full parameter of ``unsharded_params``.
    UNSHARDED = enum.auto()
    # A forward has left full parameters (``ShardedParameter.retained``), which stay until a backward that reshards.
    RETAINED = enum.auto()


@dataclass
class Accumulation:
    """Gradient accumulation of one unit. A *pending* gradient is one that a later backward reduces."""

    # How far the gradients of the next forward are reduced.
    sync: GradSync = GradSync.ALL
    # Whether the user has ever turned off (a part of) the reduction, so that gradients may be pending.
    enabled: bool = False
    # Whether the user has ever turned all of the reduction off, so that a full gradient may be pending. Which forwards
    # have run does not count, because ranks may run different numbers of them.
    in_full: bool = False
    # How many neighbouring ranks reduce the gradients of each backward together, before the last one reduces their sum
    # over the other ranks (``set_requires_all_reduce`` with a working copy); 0: none.
    within: int = 0
    # Whether a gradient is pending, or will be after the backward of a forward that has run.
    pending: bool = False
    # Whether a forward has run whose backward adds no pending gradients, so that this variant is compiled.
    has_plain_code: bool = False
    # For a root unit: whether a forward with gradients has ended since the last ``note_past_forwards``, or before it.
    forward_ended: bool = False
    forward_noted: bool = False
    # For a root unit: whether a backward has left gradients to ``finalize_backward()``, and the handle of a call of it
    # that nobody has waited for.
    left_to_finalize: bool = False
    finalization: Any = None
    # Whether a backward was announced since the last ``finalize_backward()``, as pipeline schedules do before each.
    expects_gradients: bool = False

    @property
    def has_run(self) -> bool:
        """For a root unit: whether a forward with gradients has ended."""
        return self.forward_ended or self.forward_noted

    @property
    def adds(self) -> bool:
        """Whether the backward of the next forward adds the pending gradients to its own.

        Dynamo guards on it through the text of the reductions, so it describes that backward, and not the flags of
        earlier ones. If no gradient is pending and only the accumulating variant has been compiled so far, the next
        forward keeps that variant: it gives the same result, and a second compile is avoided.
        """
        return self.sync is not GradSync.ALL or self.pending or (self.enabled and not self.has_plain_code)


class Unit:
    """The state of one ``fully_shard`` call.

    More than 20 attributes: Dynamo guards on each step of a chain of attributes, so traced code reads them from here.
    """

    def __init__(self, modules: tuple[nn.Module, ...], parameters: list[ShardedParameter], policy: CommPolicy) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        # In registration order.
        self.parameters = parameters
        # The path of its module from the root module, for messages.
        self.name = ""
        # The outermost unit around this one; None for a root unit.
        self._root: weakref.ref[Unit] | None = None
        self.is_root = True
        # The units inside its modules, at any depth.
        self.inner_units: list[Unit] = []

        self.policy = policy
        # Whether full parameters stay from forward to backward (see ``apply_reshard``).
        self.keep_for_backward = False
        # Whether full parameters stay until a backward that reshards (``set_reshard_after_backward(False)``).
        self.retain_across_microbatches = False
        # If each rank keeps only its part of them (``set_reshard_after_backward(8)``): how many ranks gather the parts.
        self.ranks_of_parts = 0
        # How many ranks gather in backward (``reshard_after_forward=8``); 0: all that shard the parameters.
        self.post_forward_world_size = 0

        # How many forwards of the unit are running. While there is one, reading a parameter gathers it.
        self.depth = 0
        self.eager = EagerForward()
        self.state = ShardState.SHARDED
        # The full parameters that ``unshard()`` gathered, by ``ShardedParameter.index``, if the state is UNSHARDED.
        self.unsharded_params: list[torch.Tensor] | None = None
        # The handle of ``unshard()``; None if it was not called since the unit was last resharded.
        self.unsharding: UnshardHandle | None = None
        # Whether the end of the root's forward reshards this unit; on the root: any inner unit (``let_root_reshard``).
        self.resharded_by_root = self.reshards_others = False
        # Whether a forward of the unit has ended in a checkpoint in a graph (``end_in_checkpoint``).
        self.ends_in_checkpoint = False
        # The full trainable parameters by index, in a forward whose unused ones get zero gradients (``unused.py``).
        self.zero_grad_params: dict[int, torch.Tensor] | None = None
        # Dynamo guards on this text, and compiled code runs for one value only. It changes if all ranks agree on
        # another plan for the unit's parameters, and in ``registry.begin_generation``.
        self.code_version = ""
        # While a forward runs: the places (``ParameterReads``, name) where other code has stored something else.
        self.replaced: list[tuple[Any, str]] | None = None

        self.accumulation = Accumulation()
        # The user's hooks for each reduced bucket of gradients, by the number of their handle.
        self.post_backward_hooks: OrderedDict[int, Callable[[list[nn.Parameter]], None]] = OrderedDict()
        self.prefetch_lists = PrefetchLists()
        self._params_by_bucket: dict[Any, list[ShardedParameter]] | None = None

        for index, parameter in enumerate(parameters):
            parameter.index = index
        self.apply_reshard()
        self.apply_reductions()
        self.assign_blocks()

    def mode_of(self, parameter: ShardedParameter) -> str:
        """How a forward reads a parameter: "full" already, or gathered and then "kept" for backward or "resharded"."""
        if self.unsharded_params is not None or (self.has_retained(parameter) and not self.ranks_of_parts):
            return "full"
        return "kept" if self.keep_for_backward else "resharded"

    def has_retained(self, parameter: ShardedParameter) -> bool:
        """Whether the next forward reads a full parameter, or gathers parts, that an earlier forward has left."""
        return self.state is ShardState.RETAINED and parameter.retained is not None

    def model_communicates_nothing(self, *, trains: bool) -> bool:
        """Whether a forward and its backward communicate nothing in any part of the model, so one rank may run alone.

        It is so if every parameter is full on all ranks, after ``unshard()`` or because its shard group has one rank,
        and, if the forward ``trains``, if no gradient is reduced (``set_requires_gradient_sync(False)``).
        """
        return all(
            (parameter.world == 1 or unit.mode_of(parameter) == "full")
            and not (trains and parameter.param.requires_grad and unit.is_synced(parameter))
            for unit in self.tree_units()
            for parameter in unit.parameters
        )

    def is_synced(self, parameter: ShardedParameter) -> bool:
        """Whether the backward of the next forward reduces the gradients of one of the unit's parameters."""
        return parameter.sync_for(self.accumulation.sync) is not GradSync.NONE

    def line_of(self, parameter: ShardedParameter, *, trains: bool, mode: str = "") -> str:
        """Describe a parameter as a plan depends on it: all ranks have the same text; another text needs another plan.

        For example "float32[4, 4], resharded, float32 avg": dtype and shape, ``mode`` (default: ``mode_of`` now), and
        how its gradient is reduced, or "frozen".
        """
        mode = mode or self.mode_of(parameter)
        reduced = parameter.read_spec.reduce if trains and parameter.param.requires_grad else "frozen"
        dtype, size, dim = str(parameter.dtype).removeprefix("torch."), list(parameter.layout.largest), parameter.dim
        line = f"{dtype}{size}" + (f" dim {dim}" if dim else "") + f", {mode}, {reduced}"
        ranks = self.ranks_of_parts if self.has_retained(parameter) else self.post_forward_world_size
        line += f", gathered again by {ranks}" if ranks else ""
        line += f", gathered as {parameter.codec}" if parameter.codec else ""
        return line + (f", prefetches {self.prefetch_lists.key}" if self.prefetch_lists.key else "")

    @torch.compiler.assume_constant_result
    def ranks_in_backward(self) -> int:
        """``post_forward_world_size``; while Dynamo traces, a guarded constant, because Dynamo could make it a symbol.

        There is also a guard on ``code_version``, because every read of the unit's parameters comes here.
        """
        traced = TracedObject.of(self)
        if traced is not None:
            traced.values("post_forward_world_size", "code_version")
        return self.post_forward_world_size

    @torch.compiler.assume_constant_result
    def parts(self) -> int:
        """``ranks_of_parts``; while Dynamo traces, a guarded constant, as ``ranks_in_backward``."""
        traced = TracedObject.of(self)
        if traced is not None:
            traced.values("ranks_of_parts")
        return self.ranks_of_parts

    # ---- modules and other units -------------------------------------------------------------------------------------
    @property
    def is_group(self) -> bool:
        """Whether it has several modules, as the unit of ``fully_shard([a, b])``."""
        return len(self._modules) > 1

    @property
    def modules(self) -> list[nn.Module]:
        """The living modules of the call."""
        return [module for reference in self._modules if (module := reference()) is not None]

    @property
    def root(self) -> Unit:
        """The outermost unit of the model."""
        return (self._root() if self._root is not None else None) or self

    def tree_units(self) -> list[Unit]:
        """The units of the model that this one is part of, outermost first."""
        return [self.root, *self.root.inner_units]

    def take_in(self, inner: list[Unit]) -> None:
        """Make these units inner units of this one."""
        self.inner_units += inner
        for unit in inner:
            unit.is_root = False
            unit._root = weakref.ref(self)
            unit.apply_reshard()
            unit.assign_blocks()

    @property
    def key(self) -> int | None:
        """The ``param_id`` of its first parameter, by which prefetch lists name the unit; None without parameters."""
        return self.parameters[0].param_id if self.parameters else None

    def name_from(self, root: nn.Module) -> None:
        """Name the unit and its parameters by their paths from ``root``."""
        modules = self.modules
        names = {id(module): name for name, module in root.named_modules()}
        self.name = ", ".join(names.get(id(module), "") for module in modules) or type(root).__name__
        for parameter in self.parameters:
            module, attribute = parameter.owner
            prefix = names.get(id(module), "")
            parameter.name = f"{prefix}.{attribute}" if prefix else attribute

    def raise_meta(self) -> None:
        """Raise RuntimeError with the names of the parameters that were never materialised, if there are any."""
        names = [parameter.name for parameter in self.parameters if parameter.shard.is_meta]
        if names:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still "
                f"on meta device: {names}\nFor example, call module.to_empty(device=...) and then "
                "module.reset_parameters() on each module, or load a checkpoint."
            )

    @torch.compiler.assume_constant_result
    def refuse_unknown_zeros(self) -> bool:
        """Raise ValueError if a parameter takes gradients of any dtype, because a zero gradient needs one dtype."""
        for parameter in self.parameters:
            if parameter.param.requires_grad and parameter.dtypes.grad is None:
                raise ValueError(
                    "compiled_fsdp: set_reduce_scatter_unused_params: reducing unused parameters with grad_dtype=None "
                    "requires an explicit MixedPrecisionPolicy.reduce_dtype, so that every rank can build zero "
                    f"gradients of the same dtype: {parameter.name!r}. Set reduce_dtype to the dtype its gradients "
                    "already have."
                )
        return True

    # ---- running forwards --------------------------------------------------------------------------------------------
    @property
    def is_open(self) -> bool:
        """Whether a forward of the unit is running."""
        return self.depth > 0 or (torch.compiler.is_dynamo_compiling() and self.is_open_in_body())

    @property
    def is_outermost(self) -> bool:
        """Whether no other unit's forward runs around this unit's: it is the root, or is called without the root."""
        if self.is_root or self.root.depth > 0:
            return self.is_root
        return not any(unit.depth for unit in self.root.inner_units if unit is not self)

    # The body of a higher-order op must not change objects outside of it, such as ``depth``, because Dynamo would then
    # trace a nested region again for each layer. A forward that begins in a body ends there: the tracer keeps a note.
    @torch.compiler.assume_constant_result
    def open_in_body(self) -> bool:
        """Note that a forward begins, if Dynamo traces a body; returns whether it does."""
        keep_writes_after_bodies()
        notes = notes_of_bodies()
        if notes:
            notes[0].append(self)
        return bool(notes)

    @torch.compiler.assume_constant_result
    def close_in_body(self) -> bool:
        """Note that a forward ends; returns whether it began in the body that Dynamo traces."""
        keep_writes_after_bodies()
        if noted := self in next(iter(notes_of_bodies()), []):
            notes_of_bodies()[0].remove(self)
        return noted

    @torch.compiler.assume_constant_result
    def is_open_in_body(self) -> bool:
        """Whether a forward of the unit is running in the bodies that Dynamo traces."""
        return any(self in notes for notes in notes_of_bodies())

    def put_back(self) -> None:
        """After a forward: store the DTensors again in the places where other code has stored something else.

        For example, ``torch.func.functional_call`` puts back the value that it found: in a forward a full parameter.
        """
        if self.replaced is None:
            return
        for reads, name in self.replaced:
            if name in reads:
                reads[name] = reads.known[name].param
        self.replaced = None

    def end_recomputation(self) -> None:
        """Note that a backward has ended, which ran parts of the unit's forward again."""
        if self.depth == 0:
            self.eager.forget()
            self.put_back()

    @torch.compiler.assume_constant_result
    def end_in_checkpoint(self) -> None:
        """Note that a forward ends in a checkpoint in a graph, where Dynamo lets it change nothing."""
        self.ends_in_checkpoint = True

    def retain(self, parameter: ShardedParameter, full: torch.Tensor) -> None:
        """Keep a full parameter that a checkpoint in a graph has read, for the next microbatch."""
        parameter.retained = full
        if self.ends_in_checkpoint:
            self.state = ShardState.RETAINED

    @torch.compiler.assume_constant_result
    def let_root_reshard(self) -> None:
        """Leave the resharding to the end of the root's forward, because a body must not change the unit."""
        self.resharded_by_root = self.root.reshards_others = True

    # ---- sharded or not ----------------------------------------------------------------------------------------------
    def apply_reshard(self) -> None:
        """Apply ``reshard_after_forward`` and ``reshard_after_backward``."""
        policy, asked = self.policy, self.policy.reshard_after_forward
        self.retain_across_microbatches = retains = not policy.reshard_after_backward
        self.ranks_of_parts = policy.ranks_of_parts
        keeps = not (not self.is_root if asked is None else asked)
        self.keep_for_backward = keeps or (retains and not self.ranks_of_parts)
        group = policy.post_forward_group
        self.post_forward_world_size = (retains and self.ranks_of_parts) or (0 if group is None else group.size)

    def set_reshard_after_backward(self, value: bool | int) -> bool:
        """Store the switch, and drop retained parameters if they are not those that it asks for.

        Returns whether ``ranks_of_parts`` has changed.
        """
        before = self.ranks_of_parts
        policy, shards = self.policy, max((parameter.world for parameter in self.parameters), default=1)
        policy.reshard_after_backward = value is True or (value is not False and 1 < value == shards)
        if not policy.reshard_after_backward:  # else the next forward may read, and its backward drops, the parts
            ranks = 0 if value in (False, 1) else value
            if ranks != policy.ranks_of_parts:
                policy.ranks_of_parts = ranks
                if self.state is ShardState.RETAINED:
                    self.reshard()
        self.apply_reshard()
        return self.ranks_of_parts != before

    def reshard(self) -> None:
        """Drop the full parameters that ``unshard()`` gathered or that a forward has retained.

        The full parameters that autograd has saved stay for their backward.
        """
        if self.unsharded_params is not None:
            self.unsharded_params = None
        if self.unsharding is not None:
            self.unsharding = None
        if self.state is not ShardState.SHARDED:
            self.drop_retained()
            self.state = ShardState.SHARDED

    def forget_reads(self) -> None:
        """Let attributes outside of a forward give DTensors again, not the tensors that the last forwards have read."""
        for known in self.eager.reads or ():
            if (reads := known()) is not None:
                reads.tensors.clear()  # because a loss that is kept for a log keeps the graph, which keeps ``reads``
        self.eager.reads = []

    def drop_retained(self) -> None:
        # in any state, because a graph may have retained some parameters while others were still being gathered
        for parameter in self.parameters:
            parameter.retained = None

    def after_backward(self, parameter: ShardedParameter) -> None:
        """Reshard, because a gradient of ``parameter`` has come, unless parameters stay for the next microbatch."""
        self.forget_reads()
        is_unsharded = self.unsharded_params is not None
        if self.policy.reshard_after_backward or (self.ranks_of_parts and is_unsharded):
            self.reshard()
        elif self.state is ShardState.RETAINED and parameter.retained is not None:
            mark_static(parameter.retained)

    # ---- how gradients are reduced -----------------------------------------------------------------------------------
    def apply_sync(self) -> bool:
        """Apply the policy's switches of gradient sync.

        Returns whether gradients may be pending from now on, for the first time or with another shape.
        """
        accumulation, policy = self.accumulation, self.policy
        self.note_past_forwards()
        within = self._ranks_that_reduce_first()
        changes, accumulation.within = within != accumulation.within, within
        if policy.defer_to_finalize or not policy.requires_gradient_sync:
            accumulation.sync = GradSync.NONE
        else:
            accumulation.sync = GradSync.ALL if self.reduces else GradSync.SHARDS_ONLY
        begins = changes or (accumulation.sync is not GradSync.ALL and not accumulation.enabled)
        becomes_full = accumulation.sync is GradSync.NONE and not accumulation.in_full
        accumulation.enabled |= begins
        accumulation.in_full |= becomes_full
        if begins or becomes_full:
            self.apply_reductions()
        self.apply_texts()
        return begins

    @property
    def reduces(self) -> bool:
        """Whether the unit's pending gradients are reduced by the end of a backward at the latest."""
        policy, groups = self.policy, (parameter.group for parameter in self.parameters)
        if policy.requires_all_reduce or not policy.requires_gradient_sync:
            return policy.requires_gradient_sync
        # replicas of size 1 count too, as with FSDP2
        return not self.accumulation.within and all(group.replicate_group is None for group in groups)

    def _ranks_that_reduce_first(self) -> int:
        """``Accumulation.within``. If it was switched on, it stays until there is another working copy, or none."""
        policy, groups = self.policy, (parameter.group for parameter in self.parameters)
        defers = policy.requires_gradient_sync and not policy.requires_all_reduce
        if self.accumulation.within != policy.ranks_of_parts and not defers:
            return 0
        return policy.ranks_of_parts if all(group.replicate_group is None for group in groups) else 0

    def pends_in_parts(self, parameter: ShardedParameter) -> bool:
        """Whether all pending gradients of a parameter are reduced over some ranks, each of which has its part."""
        has_two_reductions = bool(self.accumulation.within) or parameter.group.replicate_group is not None
        return parameter.world > 1 and has_two_reductions and not self.accumulation.in_full

    def note_past_forwards(self) -> None:
        """Note for each unit of the model whether past forwards leave pending gradients, perhaps in a later backward.

        Call it before ``sync`` changes. Only the root records its forwards, because another unit's forward may be
        inside of a checkpoint, where traced code must not change objects outside.
        """
        root = self.root
        if not root.accumulation.forward_ended:
            return
        root.accumulation.forward_ended, root.accumulation.forward_noted = False, True
        for unit in (root, *root.inner_units):
            if unit.accumulation.sync is not GradSync.ALL:
                unit.accumulation.pending = True
            elif not unit.accumulation.adds:
                unit.accumulation.has_plain_code = True

    def set_pending(self, pending: bool) -> None:
        """Record whether the unit has a pending gradient."""
        self.note_past_forwards()
        if self.accumulation.pending != pending:
            self.accumulation.pending = pending
            self.apply_texts()

    def apply_texts(self) -> None:
        """Set the reduction text and the gate that the next forward's reads use."""
        adds = self.accumulation.adds
        for parameter in self.parameters:
            sync = parameter.sync_for(self.accumulation.sync)
            parameter.active_gate = parameter.grads.gate_for(sync)
            parameter.tell(reduce=parameter.grads.text_by_sync[sync, adds])

    def apply_reductions(self) -> None:
        """Set how gradients are reduced, from policy, the user's divisor, and whether gradients may be pending."""
        common = self._common_reduce_dtypes()
        for parameter in self.parameters:
            parameter.reduce_dtype = (
                common[parameter.group] if parameter.param.requires_grad else parameter.dtypes.reduced
            )
            dtype = str(parameter.reduce_dtype).removeprefix("torch.")
            policy, any_dtype = self.policy, parameter.dtypes.grad is None
            divide = divide_factors(dtype, parameter.group.ranks_in_all, policy.divide_factor, policy.force_sum)
            how = self.accumulation.enabled, *parameter.reduce_codec, any_dtype
            spec = ReduceSpec(dtype, divide, GradSync.ALL, *how)
            adds, within = replace(spec, adds_accumulated=True), None
            if ranks := self.accumulation.within:
                parameter.group.across_parts(ranks)
                within = ranks, parameter.group.part_of(ranks).group_id
            parameter.grads.spec, parameter.grads.within = spec, ranks
            parameter.grads.text_by_sync = {
                (GradSync.ALL, False): str(replace(spec, adds_accumulated=False)),
                (GradSync.NONE, True): str(replace(adds, sync=GradSync.NONE)),
            }
            adds = replace(adds, within=within, pending_in_parts=self.pends_in_parts(parameter))
            for sync in (GradSync.SHARDS_ONLY, GradSync.ALL):
                parameter.grads.text_by_sync[sync, True] = str(replace(adds, sync=sync))
        self.apply_texts()

    def _common_reduce_dtypes(self) -> dict[ShardGroup, torch.dtype]:
        """For each group, the widest of the dtypes that its gradients ask for, because FSDP2 reduces them together."""
        asked: dict[ShardGroup, set[torch.dtype]] = {}
        for parameter in self.parameters:
            if parameter.param.requires_grad:
                asked.setdefault(parameter.group, set()).add(parameter.dtypes.reduced)
        return {group: functools.reduce(torch.promote_types, dtypes) for group, dtypes in asked.items()}

    def change_group(self, change: Callable[[ShardGroup], ShardGroup]) -> None:
        """Move the unit's parameters to other process groups over the same ranks."""
        for parameter in self.parameters:
            parameter.group = change(parameter.group)
            parameter.tell(group_id=parameter.group.group_id)
        self.regroup()

    # ---- buckets outside of graphs, and repeated blocks --------------------------------------------------------------
    def params_by_bucket(self) -> dict[Any, list[ShardedParameter]]:
        """The parameters that share collectives outside of graphs, by ``bucket_key``, in registration order."""
        if self._params_by_bucket is None:
            self._params_by_bucket = {}
            for parameter in self.parameters:
                self._params_by_bucket.setdefault(parameter.bucket_key, []).append(parameter)
        return self._params_by_bucket

    def regroup(self) -> None:
        """Forget ``params_by_bucket``, because blocks, groups or dtypes have changed."""
        self._params_by_bucket = None

    def assign_blocks(self) -> None:
        """Give every parameter its block and its position there.

        A unit inside another unit is one block, because the user has chosen its size. If a container in a root
        (ModuleList, Sequential, ModuleDict) holds several modules of one class (a transformer's layers), each is a
        block, and the rest (embedding, norm, head) is another. So one call on the root is bucketed like one per layer.
        """
        blocks: dict[int, list[ShardedParameter]] = {}
        block_of = self._block_of_parameter() if self.is_root else {}
        for parameter in self.parameters:
            blocks.setdefault(block_of.get(id(parameter), 0), []).append(parameter)
        for number, members in blocks.items():
            ids = members[0].id_tensor
            if len(members) > 1:
                ids = torch.tensor([parameter.param_id for parameter in members], device="cpu")
                mark_static(ids)
            vars(ids)["unit"] = self  # a loss keeps its unit through this tensor, see ``registry.register``
            for position, parameter in enumerate(members):
                parameter.block, parameter.block_ids = number, ids
                parameter.tell(block_size=len(members), position=position)
        self.regroup()

    def _block_of_parameter(self) -> dict[int, int]:
        mine = {
            (id(module), name): parameter for parameter in self.parameters for module, name in parameter.live_places()
        }
        block_of: dict[int, int] = {}
        for number, block in enumerate((b for module in self.modules for b in repeated_blocks(module)), start=1):
            for module in block.modules():
                for name in module._parameters:
                    if (parameter := mine.get((id(module), name))) is not None:
                        block_of.setdefault(id(parameter), number)
        return block_of
