"""Fully sharded data parallelism done by the compiler.

    from compiled_fsdp import fully_shard
    fully_shard(model)
    model = torch.compile(model, backend="compiled_fsdp")

The public names are imported on first use, because ``TORCH_LOGS=compiled_fsdp`` imports this file while torch itself is
still importing, and because ``torch.distributed.fsdp`` alone takes half a second to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# The module that defines each public name. FSDP2's policy types are re-exported, so that a script changes one import.
_PUBLIC = {
    "fully_shard": "compiled_fsdp.frontend.fully_shard",
    "replicate": "compiled_fsdp.frontend.replicate",
    "FSDPModule": "compiled_fsdp.frontend.fsdp_module",
    "register_fsdp_forward_method": "compiled_fsdp.frontend.fsdp_module",
    "share_comm_ctx": "compiled_fsdp.frontend.fsdp_module",
    "compiled_autograd": "compiled_fsdp.compiler.compiled_autograd",
    "explain": "compiled_fsdp.tools.explain",
    "install": "compiled_fsdp.frontend.install",
    "profile": "compiled_fsdp.tools.profile",
    "record_collective_names": "compiled_fsdp.tools.profile",
    "count_communication": "compiled_fsdp.base.traffic",
    "Options": "compiled_fsdp.compiler.options",
    "Hardware": "compiled_fsdp.passes.cost.hardware",
    "Contention": "compiled_fsdp.passes.cost.hardware",
    "CopyEngines": "compiled_fsdp.passes.cost.hardware",
    "Wires": "compiled_fsdp.passes.cost.hardware",
    "PROFILES": "compiled_fsdp.passes.cost.profiles",
    "load_precompiled": "compiled_fsdp.compiler.precompiled",
    "measure_hardware": "compiled_fsdp.compiler.measure",
    "Muon": "compiled_fsdp.optim.muon",
    "map_whole": "compiled_fsdp.optim.exchange",
    "TrainStep": "compiled_fsdp.training.train_step",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadPolicy": "torch.distributed.fsdp",
    "WirePolicy": "compiled_fsdp.sharding.wire_policy",
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "UnshardHandle": "torch.distributed.fsdp",
    # types that these functions return
    "Explanation": "compiled_fsdp.tools.explanation",
    "Advice": "compiled_fsdp.tools.advice",
    "CodecSavings": "compiled_fsdp.tools.codec_savings",
    "ModelCall": "compiled_fsdp.tools.steps",
    "StepProfile": "compiled_fsdp.tools.profile",
    "Measurement": "compiled_fsdp.tools.profile_text",
    "Volume": "compiled_fsdp.base.traffic",
    "Installation": "compiled_fsdp.frontend.install",
    # exceptions
    "CompiledFsdpError": "compiled_fsdp.errors",
    "GraphIsWrong": "compiled_fsdp.errors",
    "OverBudget": "compiled_fsdp.errors",
    "PatternsDiffer": "compiled_fsdp.errors",
    "PlanDoesNotFit": "compiled_fsdp.errors",
    "ProfileError": "compiled_fsdp.errors",
    "RankEnded": "compiled_fsdp.errors",
    "RanksDiffer": "compiled_fsdp.errors",
    "RecompileLimit": "compiled_fsdp.errors",
}

__all__ = [
    "PROFILES",
    "Advice",
    "CPUOffloadPolicy",
    "CodecSavings",
    "CompiledFsdpError",
    "Contention",
    "CopyEngines",
    "Explanation",
    "FSDPModule",
    "GraphIsWrong",
    "Hardware",
    "Installation",
    "Measurement",
    "MixedPrecisionPolicy",
    "ModelCall",
    "Muon",
    "OffloadPolicy",
    "Options",
    "OverBudget",
    "PatternsDiffer",
    "PlanDoesNotFit",
    "ProfileError",
    "RankEnded",
    "RanksDiffer",
    "RecompileLimit",
    "StepProfile",
    "TrainStep",
    "UnshardHandle",
    "Volume",
    "WirePolicy",
    "Wires",
    "compiled_autograd",
    "count_communication",
    "explain",
    "fully_shard",
    "install",
    "load_precompiled",
    "map_whole",
    "measure_hardware",
    "profile",
    "record_collective_names",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
]

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

    from compiled_fsdp.base.traffic import Volume, count_communication
    from compiled_fsdp.compiler.compiled_autograd import compiled_autograd
    from compiled_fsdp.compiler.measure import measure_hardware
    from compiled_fsdp.compiler.options import Options
    from compiled_fsdp.compiler.precompiled import load_precompiled
    from compiled_fsdp.errors import (
        CompiledFsdpError,
        GraphIsWrong,
        OverBudget,
        PatternsDiffer,
        PlanDoesNotFit,
        ProfileError,
        RankEnded,
        RanksDiffer,
        RecompileLimit,
    )
    from compiled_fsdp.frontend.fsdp_module import FSDPModule, register_fsdp_forward_method, share_comm_ctx
    from compiled_fsdp.frontend.fully_shard import fully_shard
    from compiled_fsdp.frontend.install import Installation, install
    from compiled_fsdp.frontend.replicate import replicate
    from compiled_fsdp.optim.exchange import map_whole
    from compiled_fsdp.optim.muon import Muon
    from compiled_fsdp.passes.cost.hardware import Contention, CopyEngines, Hardware, Wires
    from compiled_fsdp.passes.cost.profiles import PROFILES
    from compiled_fsdp.sharding.wire_policy import WirePolicy
    from compiled_fsdp.tools.advice import Advice
    from compiled_fsdp.tools.codec_savings import CodecSavings
    from compiled_fsdp.tools.explain import explain
    from compiled_fsdp.tools.explanation import Explanation
    from compiled_fsdp.tools.profile import StepProfile, profile, record_collective_names
    from compiled_fsdp.tools.profile_text import Measurement
    from compiled_fsdp.tools.steps import ModelCall
    from compiled_fsdp.training.train_step import TrainStep


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        renamed = importlib.import_module("compiled_fsdp.base.renamed")
        if name not in renamed.FUNCTIONS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        renamed.warn_renamed(f"compiled_fsdp.{name}", f"compiled_fsdp.{renamed.FUNCTIONS[name]}")
        name = renamed.FUNCTIONS[name]
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
