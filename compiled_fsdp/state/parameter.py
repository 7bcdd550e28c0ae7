"""One sharded parameter as data: its layout, padded shard, DTensor, and gradients that are not yet in ``.grad``."""

# Why: docs/design.md, note N1; docs/design.md, note N4; docs/design.md, note N6

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

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

# What modules have of their parameters in ``__dict__``, by the parameter's name there (``ShardedParameter.show``).
SHARD, GATE, ID, TEXT = "_fsdp_shard_{}", "_fsdp_gate_{}", "_fsdp_id_{}", "_fsdp_text_{}"
# Also there: the code of the property that reads it, and the user's own value where the parameter was deleted.
READ, OTHER = "_fsdp_read_{}", "_fsdp_other_{}"


def path_of(name: str) -> str:
    """A module as the user's code reaches it, by its name in the model: "blocks.0.up" is "model.blocks[0].up"."""
    return re.sub(r"\.(\d+)", r"[\1]", f"model.{name}") if name else "model"


@dataclass
class GradBuffers:
    """Where a parameter's gradients go (``runtime/gate.py``), how they are reduced, and what of them waits."""

    # What a reduced gradient flows to, of the shard's shape; None where the dtype has no gradients.
    gate: torch.Tensor | None = None
    # Scalar: what unreduced gradients end in. None until gradients of the unit may wait.
    unreduced_gate: torch.Tensor | None = None
    # Of the shard's shape: what gradients end in that wait for the replicas.
    partial_gate: torch.Tensor | None = None
    # Sum of full gradients that wait for a reduction, of the full parameter's shape.
    unsharded_accumulated_grad: torch.Tensor | None = None
    # Sum of gradients that are reduced over the shards and wait for the replicas, of the padded shard's shape.
    partial_reduce_output: torch.Tensor | None = None
    # What a codec has lost of earlier gradients and the next one carries (``WirePolicy.error_feedback``): float32, of
    # each rank's shard in a row.
    residual: torch.Tensor | None = None
    # How a gradient is reduced over all ranks.
    spec: ReduceSpec = field(default_factory=ReduceSpec)
    # The same as graphs are told it, by how far it is reduced and whether what waits is added.
    text_by_sync: dict[tuple[GradSync, bool], str] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether a gradient waits for its reduction, or for the rest of it."""
        return self.unsharded_accumulated_grad is not None or self.partial_reduce_output is not None

    def gate_for(self, sync: GradSync) -> torch.Tensor | None:
        """The gate of a gradient that is reduced so far."""
        gates = {GradSync.ALL: self.gate, GradSync.NONE: self.unreduced_gate, GradSync.SHARDS_ONLY: self.partial_gate}
        return gates[sync]


class ShardedParameter:
    """A parameter split along a dimension over a group.

    Every rank holds ``ceil(size[dim] / world)`` rows in ``shard``, the last ranks padded with zeros. The DTensor's
    local tensor is the view of the rows that exist (``torch.chunk``'s rows, perhaps none), so optimizers, checkpoints
    and clipping see what FSDP2 shows them, and a collective sees equal sizes without a copy.

    More than 20 attributes, since traced code reads them: Dynamo guards on each step of a chain of
    attributes, so what a read needs stays flat.
    """

    def __init__(self, param: nn.Parameter, places: list[tuple[nn.Module, str]], layout: Layout,
                 policy_dtypes: PolicyDtypes, device: torch.device, hook_arguments: HookArguments,
                 offload: Offload | None = None, wire: WirePolicy = EXACT) -> None:  # fmt: skip
        # ---- who it is
        # The number that stands for it, and the int64 tensor of one element, on the CPU, that carries it into graphs:
        # with no dimension Dynamo would make a symbol for its value.
        self.param_id = next(_next_id)
        self.id_tensor = torch.tensor([self.param_id], device="cpu")
        # The numbers of its block, one after the other: what a read takes, so that a graph has one input a block.
        self.block_ids = self.id_tensor
        # The modules and attribute names that hold it; more than one if it is tied.
        self.places = [(weakref.ref(module), name) for module, name in places]
        # As seen from the root module.
        self.name = places[0][1]
        # Its place among its unit's parameters.
        self.index = 0
        # The repeated block that it belongs to (0: none).
        self.block = 0

        # ---- how it lies
        self.layout, self.group = layout, layout.group
        self.dim, self.world = layout.dim, layout.group.size
        # How many rows of the shard exist on this rank; the rest is padding.
        self.rows = layout.rows
        # Whether a forward computes with a DTensor, for tensor parallelism.
        self.tensor_parallel = layout.inner_mesh is not None
        # What mixed precision says of dtypes, and what ``grad_dtype`` of the DTensor was set to.
        self.policy_dtypes, self.grad_dtype_set = policy_dtypes, grad_dtype_set_on(param)
        self.dtypes = policy_dtypes.of(param.dtype, self.grad_dtype_set)
        # In which a gradient is reduced: a unit's gradients in one dtype (``Unit.apply_reductions``).
        self.reduce_dtype = self.dtypes.reduced
        # What is sent of it and of its gradient. In a group of one rank nothing is.
        self.wire = wire if layout.group.size > 1 else EXACT
        # Where it is gathered. An offloaded shard lives on the CPU.
        self.device, self.offload = device, offload
        # What graphs are told of all this.
        self.read_spec = ReadSpec(
            layout.size, layout.group.size, layout.group.group_id, layout.dim, self.dtypes.gathered,
            device=None if offload is None else device, codec=self.wire.gather_codec(param.dtype),
        )  # fmt: skip
        self.read_text = str(self.read_spec)

        # ---- its values
        with torch.no_grad():
            shard = layout.shard_of(local_of(param) if isinstance(param, DTensor) else param.detach())
        # Of ``layout.padded`` shape and of the parameter's own dtype.
        self.shard = shard if offload is None else offload.put_away(shard)
        # The DTensor that the module holds; its memory is ``shard``'s.
        self.param = nn.Parameter(layout.dtensor(self.valid_rows()), requires_grad=param.requires_grad)
        if self.grad_dtype_set is not None:
            self.param.grad_dtype = self.grad_dtype_set[0]
        # Whether the DTensor's local tensor has hooks that say what is gathered, or is made of other tensors; then
        # ``shard`` only stands for it, and ``local`` is it.
        self.wrapped = False
        self.local: torch.Tensor | None = None
        # What its hooks are given, and what they gave, as ranks have compared it (``runtime/pieces.py``).
        self.hook_arguments, self.pieces_text = hook_arguments, cast("str | None", None)
        # Whether ranks have compared where the hooks run (``ranks/same_models.py``).
        self.hooks_are_compared = False
        # The attributes of ``local``, and what it shares with equal ones (``state/equal_hooks.py``).
        self.attributes: dict[str, Any] = {}
        self.hooks_text, self.hook_codes = "", dict[str, Any]()
        self.hold_local()
        # The full parameter, kept across microbatches (``set_reshard_after_backward``).
        self.retained: torch.Tensor | None = None

        # ---- its gradients
        self.grads = GradBuffers()
        # Of ``grads``, what the next forward's read takes.
        self.active_gate: torch.Tensor | None = None

    # ---- what graphs are told ----------------------------------------------------------------------------------------
    def tell(self, **fields: Any) -> None:
        """Change fields of ``read_spec``."""
        self.read_spec = replace(self.read_spec, **fields)
        self.read_text = str(self.read_spec)
        self.show()

    @never_compiled
    def show(self) -> None:
        """Give the modules what traced code takes for a read; to be called whenever that changes.

        Dynamo compares tensors and texts in a module's ``__dict__`` only if something was put into it since they were
        compared last, as it does with a module's parameters. Nobody else changes these in place.
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

    @property
    def dtype(self) -> torch.dtype:
        """In which it is gathered."""
        return self.read_spec.dtype

    @property
    def codec(self) -> str:
        """How it is encoded while it is sent; "": not."""
        return self.read_spec.codec

    @property
    def reduce_codec(self) -> tuple[str, bool]:
        """How its gradient is encoded while it is sent, and whether what that loses is kept."""
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
        """While Dynamo traces: whether the DTensor requires a gradient, with a guard on that alone.

        None where Dynamo does not know where the parameter came from.
        """
        traced = TracedObject.of(self)
        found = None if traced is None else traced.values("param.requires_grad")
        return None if found is None else found[0]

    @property
    def gate_dtype(self) -> torch.dtype:
        """In which autograd brings the reduced gradient: that of ``.grad``, if it is known before."""
        return self.dtypes.grad or self.dtypes.reduced

    @property
    def gate_has_shard(self) -> bool:
        """Whether the gate has the shard's memory."""
        # in a group of one a full parameter may be the shard, and a nested region's inputs may not share memory
        in_shard = self.gate_dtype == self.shard.dtype
        return in_shard and self.offload is None and self.world > 1 and not self.wrapped

    @torch.compiler.assume_constant_result
    def shard_is_gate(self) -> bool:
        """While Dynamo traces: whether the graph can take one tensor for the shard and for what its gradient flows to.

        Without a guard: ``read_text`` says all of it.
        """
        traced = TracedObject.of(self)
        if not self.gate_has_shard or (traced is not None and traced.has_changed("active_gate")):
            return False
        return self.active_gate is self.grads.gate

    @torch.compiler.assume_constant_result
    def is_meta(self) -> bool:
        """Whether it was never materialised. While Dynamo traces: without making the shard an input of the graph.

        Without a guard: that of the input which the graph does read says it.
        """
        return self.shard.is_meta

    def has_grad_dtype(self) -> bool:
        """Whether nobody has set another ``grad_dtype`` on the DTensor since it was looked at last."""
        expected = self.shard.dtype if self.grad_dtype_set is None else self.grad_dtype_set[0]
        return self.param.grad_dtype == expected

    def set_grad(self, rows: torch.Tensor) -> None:
        """Make ``rows``, those that exist of the reduced gradient, the DTensor's ``.grad``.

        Raises:
            RuntimeError: code that was compiled before ``grad_dtype`` was set has made a gradient of another dtype.
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
        """Follow the DTensor's local tensor, if it is ``wrapped``."""
        local = local_of(self.param)
        self.wrapped = is_wrapped(local)
        if self.wrapped:
            self.local, self.pieces_text = local, None
            self.attributes = vars(local)
            self.shard = stand_in(local, self.layout.padded)

    def held_tensors(self) -> list[torch.Tensor]:
        """What a ``wrapped`` local tensor is made of."""
        return [value for value in self.attributes.values() if isinstance(value, torch.Tensor)]

    def valid_rows(self) -> torch.Tensor:
        """The rows of the shard that exist: a view."""
        return self.shard.narrow(self.dim, 0, self.rows)

    @property
    def bucket_key(self) -> tuple[Any, ...]:
        """What parameters that share a collective outside of graphs have in common: the block first."""
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
        """Bytes of the full, padded parameter as it is gathered."""
        return self.world * sent_nbytes(self.codec, self.shard.numel(), self.dtype)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of the full, padded gradient as it is reduced."""
        return self.world * sent_nbytes(self.grads.spec.codec, self.shard.numel(), self.reduce_dtype)

    @property
    def may_train(self) -> bool:
        """Whether its dtype has gradients: integers are frozen for ever, others may be thawed."""
        return self.shard.is_floating_point() or self.shard.is_complex()

    def is_current(self) -> bool:
        """Whether the DTensor's memory is still the shard's, and its ``grad_dtype`` the same.

        ``torch.utils.swap_tensors`` and the like change it silently.
        """
        local = local_of(self.param)
        if not self.has_grad_dtype():
            return False
        if self.wrapped or is_wrapped(local):
            return self.wrapped and local is self.local
        if self.rows == 0:  # a tensor without elements has no pointer of its own
            return storage_id(local) == storage_id(self.shard)
        return address_of(local) == address_of(self.shard)
