"""One sharded parameter as data: its layout, padded shard, DTensor, and pending gradients."""

# Why: docs/design/reads.md, "Shards are padded to equal sizes"
# Why: docs/design/reads.md, "Graphs name no ranks and no layers"
# Why: docs/design/reads.md, "Freezing works at any time"

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compiled_fsdp.buckets import collectives
from compiled_fsdp.buckets.codec import sent_nbytes
from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import ReadSpec
from compiled_fsdp.compat.autograd import address_of, dtensor_like, grad_dtype_set_on, local_of, storage_id
from compiled_fsdp.compat.dynamo import never_compiled
from compiled_fsdp.compat.tracing import TracedObject
from compiled_fsdp.sharding.extension import HookArguments, is_wrapped, stand_in
from compiled_fsdp.sharding.layout import Layout
from compiled_fsdp.sharding.offload import Offload
from compiled_fsdp.sharding.precision import PolicyDtypes
from compiled_fsdp.sharding.wire_policy import EXACT, WirePolicy

_next_id = itertools.count()

# The keys of a parameter's entries in its module's ``__dict__``, by its name there (``ShardedParameter.show``).
SHARD, GATE, ID, TEXT = "_fsdp_shard_{}", "_fsdp_gate_{}", "_fsdp_id_{}", "_fsdp_text_{}"
# Two more: the ``ShardedParameter``, and the user's own value if the parameter is None or was deleted.
READ, OTHER = "_fsdp_read_{}", "_fsdp_other_{}"


def path_of(name: str) -> str:
    """Convert a module's name to a path as the user's code writes it: "blocks.0.up" to "model.blocks[0].up"."""
    return re.sub(r"\.(\d+)", r"[\1]", f"model.{name}") if name else "model"


@dataclass
class GradBuffers:
    """A parameter's gates (``runtime/gate.py``), its pending gradients, and how its gradients are reduced."""

    # Where fully reduced gradients end, of the shard's shape; None if the dtype has no gradients.
    gate: torch.Tensor | None = None
    # Where gradients end that are not reduced: a scalar. It and the next one are None until gradients may be pending.
    unreduced_gate: torch.Tensor | None = None
    # Where gradients end that are reduced over the shards but not over the replicas, of the shard's shape; or those
    # that ``within`` neighbouring ranks have reduced, of the shape ``ShardedParameter.partial_shape``.
    partial_gate: torch.Tensor | None = None
    # How many neighbouring ranks reduce a gradient that is then pending for the others; 0: all that shard it.
    within: int = 0
    # Sum of pending full gradients, of the full parameter's shape.
    unsharded_accumulated_grad: torch.Tensor | None = None
    # Sum of pending gradients that are reduced over the shards or within a part of them; the shape of the gate.
    partial_reduce_output: torch.Tensor | None = None
    # The codec's errors in earlier gradients, which are added to the next one (``WirePolicy.error_feedback``): float32,
    # [ranks, elements of a shard].
    residual: torch.Tensor | None = None
    # How a gradient is reduced over all ranks.
    spec: ReduceSpec = field(default_factory=ReduceSpec)
    # ``spec`` as text for graphs, by how far the gradient is reduced and whether pending gradients are added to it.
    text_by_sync: dict[tuple[GradSync, bool], str] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether a gradient is pending, because it is not reduced or not reduced over the replicas."""
        return self.unsharded_accumulated_grad is not None or self.partial_reduce_output is not None

    def gate_for(self, sync: GradSync) -> torch.Tensor | None:
        """The gate where a gradient ends that is reduced as far as ``sync``."""
        gates = {GradSync.ALL: self.gate, GradSync.NONE: self.unreduced_gate, GradSync.SHARDS_ONLY: self.partial_gate}
        return gates[sync]


@dataclass
class Hooks:
    """The state of a parameter's all-gather extensions."""

    # The unit's arguments for them.
    arguments: HookArguments
    # The number of the group of parameters with equal hooks, and the hooks as graphs have them, which the group shares
    # (``state/equal_hooks.py``).
    text: str = ""
    codes: dict[str, Any] = field(default_factory=dict)
    # Whether ranks have compared if the hooks run in a graph or in eager code (``ranks/same_models.py``).
    are_compared: bool = False
    # The hooks' results as text, once ranks have compared them (``runtime/pieces.py``).
    pieces_text: str | None = None


class ShardedParameter:
    """A parameter that is split along one dimension over a group of ranks.

    Every rank holds ``ceil(size[dim] / world)`` rows in ``shard``; the last ranks' shards are padded with zeros. The
    DTensor's local tensor is a view of the rows that exist (``torch.chunk``'s rows, perhaps none). So optimizers,
    checkpoints and clipping see the same tensors as with FSDP2, and a collective sees equal sizes without a copy.

    More than 20 attributes, because traced code reads them: Dynamo guards on each step of a chain of attributes, so all
    inputs of a read are attributes of this object.
    """

    def __init__(self, param: nn.Parameter, places: list[tuple[nn.Module, str]], layout: Layout,
                 policy_dtypes: PolicyDtypes, device: torch.device, hook_arguments: HookArguments,
                 offload: Offload | None = None, wire: WirePolicy = EXACT) -> None:  # fmt: skip
        # ---- identity
        # Its number, and the int64 CPU tensor [1] that carries the number into graphs. The tensor has a dimension,
        # because Dynamo would make a symbol for the value of a scalar tensor.
        self.param_id = next(_next_id)
        self.id_tensor = torch.tensor([self.param_id], device="cpu")
        # The numbers of all parameters in its block. A read takes this tensor, so that a graph has one input per block.
        self.block_ids = self.id_tensor
        # The modules and attribute names that hold it; more than one if it is tied.
        self.places = [(weakref.ref(module), name) for module, name in places]
        # Its path from the root module.
        self.name = places[0][1]
        # Its position among its unit's parameters.
        self.index = 0
        # The number of the repeated block that it belongs to (0: none).
        self.block = 0

        # ---- layout, dtypes and codecs
        self.layout, self.group = layout, layout.group
        self.dim, self.world = layout.dim, layout.group.size
        # How many rows of the shard exist on this rank; the rest is padding.
        self.rows = layout.rows
        # Whether a forward computes with a DTensor, for tensor parallelism.
        self.tensor_parallel = layout.inner_mesh is not None
        # The dtypes that mixed precision asks for, and the ``grad_dtype`` that somebody has set on the DTensor.
        self.policy_dtypes, self.grad_dtype_set = policy_dtypes, grad_dtype_set_on(param)
        self.dtypes = policy_dtypes.of(param.dtype, self.grad_dtype_set)
        # The dtype in which its gradient is reduced: one per unit and group (``Unit.apply_reductions``).
        self.reduce_dtype = self.dtypes.reduced
        # The codecs of its gathers and reductions. A group of one rank sends nothing, so it needs none.
        self.wire = wire if layout.group.size > 1 else EXACT
        # The device that gathers it. An offloaded shard is in host memory.
        self.device, self.offload = device, offload
        # These facts as graphs get them.
        self.read_spec = ReadSpec(
            layout.size, layout.group.size, layout.group.group_id, layout.dim, self.dtypes.gathered,
            device=None if offload is None else device, codec=self.wire.gather_codec(param.dtype),
        )  # fmt: skip
        self.read_text = str(self.read_spec)

        # ---- its values
        with torch.no_grad():
            shard = layout.shard_of(local_of(param) if isinstance(param, DTensor) else param.detach())
        # The padded shard, of shape ``layout.padded`` and the parameter's own dtype.
        self.shard = shard if offload is None else offload.put_away(shard)
        # The DTensor that the module holds; it has the memory of ``shard``.
        self.param = nn.Parameter(layout.dtensor(self.valid_rows()), requires_grad=param.requires_grad)
        if self.grad_dtype_set is not None:
            self.param.grad_dtype = self.grad_dtype_set[0]
        # Whether the DTensor's local tensor has all-gather extensions or is made of other tensors. If so, ``local`` is
        # that tensor, and ``shard`` is a stand-in with its shape, dtype and device.
        self.wrapped = False
        self.local: torch.Tensor | None = None
        # The ``__dict__`` of ``local``.
        self.attributes: dict[str, Any] = {}
        self.hooks = Hooks(hook_arguments)
        self.hold_local()
        # The full parameter, or this rank's part of it (``Unit.ranks_of_parts``), kept across microbatches.
        self.retained: torch.Tensor | None = None

        # ---- its gradients
        self.grads = GradBuffers()
        # The gate in ``grads`` where the gradient of the next forward's read ends.
        self.active_gate: torch.Tensor | None = None

    # ---- arguments of reads in graphs --------------------------------------------------------------------------------
    def tell(self, **fields: Any) -> None:
        """Change fields of ``read_spec``, and show the new text to the modules."""
        self.read_spec = replace(self.read_spec, **fields)
        self.read_text = str(self.read_spec)
        self.show()

    @never_compiled
    def show(self) -> None:
        """Put the arguments of a traced read into the ``__dict__`` of the parameter's modules.

        Call it whenever one of them changes. Dynamo compares tensors and texts in a module's ``__dict__`` only if an
        entry was set since the last comparison, as with a module's parameters. No other code sets these entries.
        """
        for module, name in self.live_places():
            module.__dict__.update(
                {
                    SHARD.format(name): self.shard,
                    GATE.format(name): self.active_gate,
                    ID.format(name): self.block_ids,
                    TEXT.format(name): self.read_text,
                }
            )

    @torch.compiler.assume_constant_result
    def part_text(self, ranks: int) -> str:
        """The text of a read that ``ranks`` neighbours gather from their parts of the full parameter.

        It makes no guard, because every graph with such a read guards on ``read_text``, too.
        """
        # parts are cut from decoded parameters, on the device that computes, and are not encoded again
        group_id = self.group.part_of(ranks).group_id
        return str(replace(self.read_spec, world=ranks, group_id=group_id, device=None, codec=""))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is gathered."""
        return self.read_spec.dtype

    @property
    def codec(self) -> str:
        """The codec of its gathers, as text; "" if it has none."""
        return self.read_spec.codec

    @property
    def reduce_codec(self) -> tuple[str, bool]:
        """The codec of its reductions, as text ("" if it has none), and whether the codec's error is kept."""
        codec = self.wire.reduce_codec(self.reduce_dtype)
        return codec, bool(codec) and self.wire.error_feedback

    # ---- places ------------------------------------------------------------------------------------------------------
    @property
    def owner(self) -> tuple[nn.Module, str]:
        """The first module that holds the parameter, and the attribute's name."""
        return next(self.live_places())

    def live_places(self) -> Iterator[tuple[nn.Module, str]]:
        """Every living module that holds the parameter, with the attribute's name."""
        for reference, name in self.places:
            if (module := reference()) is not None:
                yield module, name

    # ---- gradients ---------------------------------------------------------------------------------------------------
    @torch.compiler.assume_constant_result
    def trains_in_graph(self) -> bool | None:
        """While Dynamo traces: whether the DTensor requires a gradient, with a guard on that attribute alone.

        None if Dynamo does not know where the parameter came from.
        """
        traced = TracedObject.of(self)
        found = None if traced is None else traced.values("param.requires_grad")
        return None if found is None else found[0]

    def sync_for(self, asked: GradSync) -> GradSync:
        """How far its gradients are reduced if its unit asks for ``asked``."""
        # a gradient of a single shard is reduced by its all-reduce alone, so without that it is not reduced at all
        return GradSync.NONE if asked is GradSync.SHARDS_ONLY and self.world == 1 else asked

    @property
    def partial_shape(self) -> tuple[int, ...]:
        """The shape of a gradient that ``grads.within`` ranks have reduced, several shards; or all ranks, one shard."""
        shard = tuple(self.shard.shape)
        return (self.world // self.grads.within, *shard) if self.grads.within else shard

    @property
    def ranks_of_partial(self) -> int:
        """How many neighbouring ranks have reduced the gradient that is pending for the others; all: the replicas."""
        partial = self.grads.partial_reduce_output
        assert partial is not None
        return self.world if partial.dim() == self.shard.dim() else self.world // partial.shape[0]

    @property
    def gate_dtype(self) -> torch.dtype:
        """The dtype in which autograd brings the reduced gradient to the gate: that of ``.grad``, if it is fixed."""
        return self.dtypes.grad or self.dtypes.reduced

    @property
    def gate_has_shard(self) -> bool:
        """Whether the gate has the shard's memory."""
        # not in a group of one, where a full parameter may be the shard: a nested region's inputs must not share memory
        in_shard = self.gate_dtype == self.shard.dtype
        return in_shard and self.offload is None and self.world > 1 and not self.wrapped

    @torch.compiler.assume_constant_result
    def shard_is_gate(self) -> bool:
        """While Dynamo traces: whether the graph can take one tensor as both the shard and the gate.

        It makes no guard, because the guard on ``read_text`` covers the answer.
        """
        traced = TracedObject.of(self)
        if not self.gate_has_shard or (traced is not None and traced.has_changed("active_gate")):
            return False
        return self.active_gate is self.grads.gate

    @torch.compiler.assume_constant_result
    def is_meta(self) -> bool:
        """Whether it was never materialised. While Dynamo traces, the shard does not become an input of the graph.

        It makes no guard, because the guard on the tensor that the graph does read covers the answer.
        """
        return self.shard.is_meta

    def has_grad_dtype(self) -> bool:
        """Whether the DTensor's ``grad_dtype`` is still the one that this object knows."""
        expected = self.shard.dtype if self.grad_dtype_set is None else self.grad_dtype_set[0]
        return self.param.grad_dtype == expected

    def set_grad(self, rows: torch.Tensor) -> None:
        """Set the DTensor's ``.grad`` to ``rows``, the existing rows of the reduced gradient.

        Raises:
            RuntimeError: the gradient has another dtype, because it was compiled before ``grad_dtype`` was set.
        """
        try:
            self.param.grad = dtensor_like(self.param, rows)
        except RuntimeError as error:
            if self.param.grad_dtype in (None, rows.dtype):
                raise
            raise RuntimeError(
                f"compiled_fsdp: the gradient of {self.name!r} is {rows.dtype}, but its grad_dtype was set to "
                f"{self.param.grad_dtype} after the model's forward was compiled. Set grad_dtype before the first "
                "forward, or call torch._dynamo.reset() after setting it."
            ) from error

    # ---- shard -------------------------------------------------------------------------------------------------------
    def hold_local(self) -> None:
        """Take over the DTensor's local tensor and its attributes, if it is ``wrapped``."""
        local = local_of(self.param)
        self.wrapped = is_wrapped(local)
        if self.wrapped:
            self.local, self.pieces_text = local, None
            self.attributes = vars(local)
            self.shard = stand_in(local, self.layout.padded)

    def held_tensors(self) -> list[torch.Tensor]:
        """The tensors that a ``wrapped`` local tensor is made of."""
        return [value for value in self.attributes.values() if isinstance(value, torch.Tensor)]

    def valid_rows(self) -> torch.Tensor:
        """A view of the shard's rows that exist, without the padding."""
        return self.shard.narrow(self.dim, 0, self.rows)

    @property
    def bucket_key(self) -> tuple[Any, ...]:
        """A key that is equal for parameters that share a collective outside of graphs; the block comes first."""
        reduced = self.reduce_dtype, self.grads.spec.codec, self.grads.spec.any_dtype
        return self.block, self.dtype, self.group.group_id, self.codec, self.wrapped, *reduced

    @property
    def in_host_memory(self) -> bool:
        """Whether its shard is in host memory, and it is gathered on another device."""
        return self.shard.device.type == "cpu" and self.device.type != "cpu"

    def all_gather_input(self) -> torch.Tensor:
        """The shard as a gather sends it: one dimension, in the wire's dtype, on the device that computes."""
        return collectives.to_gather(self.shard, self.dtype, self.read_spec.device, self.codec)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full, padded parameter as its gather sends it."""
        return self.world * sent_nbytes(self.codec, self.shard.numel(), self.dtype)

    @property
    def may_train(self) -> bool:
        """Whether its dtype has gradients. Integers are always frozen; others may be unfrozen later."""
        return self.shard.is_floating_point() or self.shard.is_complex()

    def is_current(self) -> bool:
        """Whether the DTensor still has the shard's memory, and the same ``grad_dtype``.

        For example, ``torch.utils.swap_tensors`` changes the memory, and nothing tells compiled_fsdp.
        """
        local = local_of(self.param)
        if not self.has_grad_dtype():
            return False
        if self.wrapped or is_wrapped(local):
            return self.wrapped and local is self.local
        if self.rows == 0:  # a tensor without elements has no pointer of its own
            return storage_id(local) == storage_id(self.shard)
        return address_of(local) == address_of(self.shard)
