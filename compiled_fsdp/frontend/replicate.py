"""``replicate``: data parallelism with whole parameters on every rank, with the signature of torch's ``replicate``.

A replicated module is a unit like a sharded one, in a group of one shard. So it has the same methods, and the planner
divides its all-reduces into buckets as it does with reductions over shards.
"""

# Why: docs/design/communication.md, "A group of one shard reduces by one all-reduce"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from torch import nn

from compiled_fsdp.compat.modules import replicate_state
from compiled_fsdp.frontend.fsdp_module import FSDPModule
from compiled_fsdp.frontend.fully_shard import Arguments, shard_units
from compiled_fsdp.sharding.wire_policy import WirePolicy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

    from compiled_fsdp.frontend.fully_shard import WrapPolicy

M = TypeVar("M", bound=nn.Module)


@overload
def replicate(module: nn.Module, *, mesh: DeviceMesh | None = ..., mp_policy: MixedPrecisionPolicy | None = ...,
              offload_policy: OffloadPolicy | None = ..., ignored_params: set[nn.Parameter] | None = ...,
              dp_mesh_dims: DataParallelMeshDims | None = ..., sync_module_states: bool = ...,
              auto_wrap_policy: WrapPolicy | None = ...,
              wire_policy: WirePolicy | None = ...) -> FSDPModule: ...  # fmt: skip
@overload
def replicate(module: list[M], *, mesh: DeviceMesh | None = ..., mp_policy: MixedPrecisionPolicy | None = ...,
              offload_policy: OffloadPolicy | None = ..., ignored_params: set[nn.Parameter] | None = ...,
              dp_mesh_dims: DataParallelMeshDims | None = ..., sync_module_states: bool = ...,
              auto_wrap_policy: None = ...,
              wire_policy: WirePolicy | None = ...) -> list[FSDPModule]: ...  # fmt: skip


def replicate(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    sync_module_states: bool = False,
    auto_wrap_policy: WrapPolicy | None = None,
    wire_policy: WirePolicy | None = None,
) -> Any:
    """Replicate ``module`` over ``mesh``, in place, and return it: every rank keeps whole parameters.

    Nothing is gathered. Gradients are averaged by all-reduces, which the planner divides into buckets and launches
    while backward computes. Use it if parameters, gradients and optimizer state fit on every rank, because an
    all-reduce sends two thirds of the bytes that two gathers and a reduce-scatter send. For example::

        replicate(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model.compile(backend="compiled_fsdp")

    Every parameter becomes a DTensor with the placement ``Replicate()``, so that a checkpoint of a replicated model
    loads into a sharded one, and the other way around. The module gets the methods of ``FSDPModule``. As with
    ``fully_shard``, build the optimizer afterwards. One call on the root is enough; a call on each layer first makes
    each layer a unit.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a 1-D device mesh (default: all ranks). Parameters that are DTensors on another slice of the same mesh
            (tensor parallelism) stay so.
        mp_policy: as for ``fully_shard``.
        offload_policy: as for ``fully_shard``.
        ignored_params: parameters that are left as they are. Their gradients are not averaged.
        dp_mesh_dims: the dimensions of ``mesh`` to replicate over, if the parameters are DTensors on the whole mesh
            (torch 2.13).
        sync_module_states: first broadcast parameters and buffers from the mesh's first rank, as
            DistributedDataParallel does. Without it all ranks must have built equal modules.
        auto_wrap_policy: as for ``fully_shard``.
        wire_policy: None, or a ``WirePolicy`` without codecs.

    Raises:
        ValueError: ``mesh`` does not have one dimension, ``dp_mesh_dims`` names a dimension to shard over, or an
            argument or a parameter is one that ``fully_shard`` refuses.
        RuntimeError: there is no process group, or the device is missing.
        NotImplementedError: ``wire_policy`` has a codec.

        If it raises, ``module`` is as it was before the call.
    """
    arguments = Arguments(
        mesh, None, None, mp_policy, offload_policy, ignored_params, dp_mesh_dims, sync_module_states, wire_policy,
        replicates=True,
    )  # fmt: skip
    try:
        return shard_units(module, arguments, auto_wrap_policy)
    except (ValueError, RuntimeError) as error:
        # the checks are those of fully_shard; NotImplementedError is a RuntimeError
        text = str(error)
        if text.startswith("fully_shard:"):
            error.args = (f"replicate:{text.removeprefix('fully_shard:')}",)
        raise


# As torch's ``replicate.state(module)``, which torch's own code calls by this name while ``install()`` is in effect.
cast("Any", replicate).state = replicate_state
