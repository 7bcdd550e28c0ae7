"""The layout of a planned model on its ranks: the mesh, tensor parallel layers, units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from compiled_fsdp.frontend.fully_shard import fully_shard
from compiled_fsdp.sharding.wire_policy import WirePolicy
from compiled_fsdp.tools.cli.shapes import Decoder, Experts


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training step.

    Attributes:
        policy: the dtypes of gathered parameters and of reductions.
        weights: the dtype of the weights, of their gradients and of AdamW's two moments.
    """

    policy: MixedPrecisionPolicy
    weights: torch.dtype = torch.float32


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
_BF16_SUMS_IN_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PRECISIONS = {
    "bf16": Precision(_BF16_SUMS_IN_FP32),
    "bf16-reduce": Precision(_BF16),
    "bf16-weights": Precision(_BF16_SUMS_IN_FP32, torch.bfloat16),
    "bf16-all": Precision(_BF16, torch.bfloat16),
    "fp32": Precision(MixedPrecisionPolicy()),
}


def mesh_of(replicate: int, shards: int, tensor: int) -> DeviceMesh:
    """Make the mesh ``("replicate", "shard", "tensor")``. Neighbouring ranks are on the last dimension."""
    return init_device_mesh("cpu", (replicate, shards, tensor), mesh_dim_names=("replicate", "shard", "tensor"))


def data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for ``fully_shard``: without the tensor parallel dimension.

    It has the dimension of replicas only if there are several.
    """
    return mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]


def wire_policy(text: str) -> WirePolicy:
    """Make the policy of one codec for gathers and reductions ("int8"), or of two ("int8/bfloat16").

    "none" is no codec.

    Raises:
        ValueError: there is no such codec.
    """
    gather, _, reduce = text.partition("/")
    codecs = {"gather": gather, "reduce": reduce or gather}
    given: dict[str, Any] = {field: None if name == "none" else name for field, name in codecs.items()}
    return WirePolicy(**given)


def shard(
    model: nn.Module, mesh: DeviceMesh, precision: str, reshard_after_forward: bool | int | str, wire: str
) -> None:
    """Shard a model: a named model gets a unit for each layer and the root, another model only the root.

    The root alone is divided at repeated layers.
    """
    given: dict[str, Any] = {"mesh": data_parallel(mesh), "mp_policy": PRECISIONS[precision].policy}
    given["wire_policy"] = wire_policy(wire)
    if reshard_after_forward != "auto":
        given["reshard_after_forward"] = reshard_after_forward
    if isinstance(model, Decoder):
        for layer in model.layers:
            fully_shard(layer, **given)
    fully_shard(model, **given)


def split_over(model: Decoder, mesh: DeviceMesh) -> None:
    """Split the layers of a named model over ``mesh``, and the tokens between the layers, too.

    This is Megatron's scheme (arXiv:1909.08053) with sequence parallel norms (arXiv:2205.05198): an all-gather before
    each attention and each feed-forward network, and a reduce-scatter after it.

    Raises:
        ValueError: the mesh's size does not divide the key and value heads or the vocabulary, or the model has experts
            or learned positions.
    """
    size, shape = mesh.size(), model.shape
    for name, count in (("key and value heads", shape.kv_heads), ("tokens of the vocabulary", shape.vocabulary)):
        if count % size:
            raise ValueError(f"--tensor-parallel {size} does not divide the {count} {name} of {shape.name}.")
    if any(isinstance(module, Experts) for module in model.modules()):
        raise ValueError(
            f"--tensor-parallel: the experts of {shape.name} cannot be split; use a factory (--model module:function)."
        )
    if shape.positions or shape.tied:
        raise ValueError(
            f"--tensor-parallel: the learned positions and the tied head of {shape.name} cannot be split; use a "
            "factory (--model module:function)."
        )
    whole, tokens = Replicate(), Shard(1)
    gathered = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,))
    layer: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=tokens),
        "ffn_norm": SequenceParallel(),
        "ffn": gathered,
        **{f"ffn.{name}": ColwiseParallel() for name in (("w1", "w3") if shape.gated else ("w1",))},
        "ffn.w2": RowwiseParallel(output_layouts=tokens),
    }
    outside: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=whole),
    }
    for one in model.layers:
        parallelize_module(one, mesh, layer)
    parallelize_module(model, mesh, outside)
