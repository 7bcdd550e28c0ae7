"""FSDP2's all-gather extensions: two hooks of a tensor subclass that define how a parameter is gathered.

``fsdp_pre_all_gather`` makes tensors of any dtypes, and metadata, from a parameter's local shard. Each of these tensors
is gathered, and ``fsdp_post_all_gather`` makes the full parameter from them. For example, torchao's hooks cast a shard
to float8, so that one byte an element is sent.
"""

# Why: docs/design/communication.md, "Extensions gather a list of pieces"

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

PRE_HOOK, POST_HOOK = "fsdp_pre_all_gather", "fsdp_post_all_gather"


@dataclass(frozen=True)
class HookArguments:
    """The values of a unit that the hooks of its parameters get as arguments."""

    # The mesh of the ranks that shard, 1-D.
    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy

    @staticmethod
    def of(mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy | None) -> HookArguments:
        """Make the arguments from a 1-D mesh (shards) or a 2-D mesh (replicas, shards)."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        names = mesh.mesh_dim_names
        shards = mesh if mesh.ndim == 1 or names is None else mesh[names[-1]]
        return HookArguments(shards, mp_policy if mp_policy is not None else MixedPrecisionPolicy())


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor cannot be gathered as it is, because it has a hook or is made of other tensors."""
    return hasattr(tensor, PRE_HOOK) or hasattr(tensor, "__tensor_flatten__")


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has FSDP2's all-gather extensions."""
    return hasattr(tensor, PRE_HOOK) or hasattr(tensor, POST_HOOK)


def check_hooks(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if a parameter has only one of the two hooks, or a pre-hook with an unknown signature.

    Args:
        name: the parameter's name, for the message.
        tensor: has at least one of the hooks.
    """
    kind = type(tensor).__name__
    for hook, other in ((PRE_HOOK, POST_HOOK), (POST_HOOK, PRE_HOOK)):
        if not hasattr(tensor, hook):
            raise ValueError(
                f"compiled_fsdp: parameter {name} is a {kind} with {other} but without {hook}. Both "
                f"{PRE_HOOK} and {POST_HOOK} should be defined if using all-gather extensions."
            )
    if number_of_arguments(tensor) not in (1, 5):
        signature = inspect.signature(getattr(tensor, PRE_HOOK))
        raise ValueError(
            f"compiled_fsdp: parameter {name} is a {kind} with an invalid {PRE_HOOK}{signature}; it must be "
            f"{PRE_HOOK}(self, mesh, outer_size, outer_stride, module, mp_policy), or (self, mesh)."
        )


def number_of_arguments(tensor: torch.Tensor) -> int:
    """The number of arguments of ``fsdp_pre_all_gather``: 5, or 1 in its first version, which takes only the mesh."""
    return len(inspect.signature(getattr(tensor, PRE_HOOK)).parameters)


def stand_in(local: torch.Tensor, padded: list[int]) -> torch.Tensor:
    """Make a plain tensor that stands for the padded shard of a tensor that cannot be gathered as it is.

    It has the shape ``padded``, and the dtype and device of ``local``, but the memory of a single zero.
    """
    return torch.zeros((), dtype=local.dtype, device=local.device).expand(padded)
