"""FSDP2's all-gather extensions: tensors that say by two hooks what is gathered of them, and what is made of it.

``fsdp_pre_all_gather`` makes tensors of a parameter's local shard, of any dtypes, and metadata; each of them is
gathered, and ``fsdp_post_all_gather`` makes the full parameter of that.
"""

# Why: docs/design.md, note N63

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
    """What the hooks of a unit's parameters are given of the unit."""

    # The dimension of the mesh that shards.
    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy

    @staticmethod
    def of(mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy | None) -> HookArguments:
        """For a 1-D mesh (shards), or a 2-D one (replicas, shards)."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        names = mesh.mesh_dim_names
        shards = mesh if mesh.ndim == 1 or names is None else mesh[names[-1]]
        return HookArguments(shards, mp_policy if mp_policy is not None else MixedPrecisionPolicy())


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not gathered as it is: it has a hook, or is made of other tensors."""
    return hasattr(tensor, PRE_HOOK) or hasattr(tensor, "__tensor_flatten__")


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has FSDP2's all-gather extensions."""
    return hasattr(tensor, PRE_HOOK) or hasattr(tensor, POST_HOOK)


def check_hooks(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a parameter with one hook of two, or with a signature that is not known.

    Args:
        name: the parameter's, for people.
        tensor: has a hook.
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
            f"compiled_fsdp: parameter {name} is a {kind} with an invalid {PRE_HOOK}{signature}: expected is "
            f"{PRE_HOOK}(self, mesh, outer_size, outer_stride, module, mp_policy), or (self, mesh)."
        )


def number_of_arguments(tensor: torch.Tensor) -> int:
    """Of ``fsdp_pre_all_gather``: 5, or the mesh alone in its first version."""
    return len(inspect.signature(getattr(tensor, PRE_HOOK)).parameters)


def stand_in(local: torch.Tensor, padded: list[int]) -> torch.Tensor:
    """A plain tensor in the place of a padded shard that is not: its shape, dtype and device, with a single zero."""
    return torch.zeros((), dtype=local.dtype, device=local.device).expand(padded)
