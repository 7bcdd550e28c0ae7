"""The exceptions that only compiled_fsdp raises, for ``except`` clauses.

Each one is a ``CompiledFsdpError`` and also a builtin exception. For example, ``OverBudget`` is a ``RuntimeError``.

from compiled_fsdp.errors import RankEnded, RanksDiffer

try:
    train()
except (RanksDiffer, RankEnded) as error:  # the error names a rank: save a checkpoint, or start again
    ...
"""

from __future__ import annotations

from compiled_fsdp.base.errors import CompiledFsdpError
from compiled_fsdp.compiler.recompile_limit import RecompileLimit
from compiled_fsdp.compiler.user_buckets import PatternsDiffer
from compiled_fsdp.passes.plan.convert import PlanDoesNotFit
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.passes.verify import GraphIsWrong
from compiled_fsdp.ranks.failures import RankEnded, RanksDiffer
from compiled_fsdp.tools.profile_recorder import ProfileError

__all__ = [
    "CompiledFsdpError",
    "GraphIsWrong",
    "OverBudget",
    "PatternsDiffer",
    "PlanDoesNotFit",
    "ProfileError",
    "RankEnded",
    "RanksDiffer",
    "RecompileLimit",
]
