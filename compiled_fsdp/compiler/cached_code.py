"""Code from AOTAutograd's cache: whether all ranks take it, and what is kept beside it for that.

Kept are the decisions that the ranks had come to and the reports of the graphs: one JSON file for a compile, named
after Inductor's keys of its lowered graphs, so that it cannot belong to other code, and written as a whole.
"""

# Why: docs/design.md, note N56

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_fsdp.base.files import OURS, replace_text
from compiled_fsdp.base.logs import warn_once
from compiled_fsdp.base.plain_data import PlainData
from compiled_fsdp.buckets.agreed_plan import AgreedPlan
from compiled_fsdp.compat.code_cache import LoadedCode, cache_directory
from compiled_fsdp.compat.compilers import source_hash
from compiled_fsdp.compat.graphs import hint
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.ranks.agreement import CACHED_CODE, Agreement
from compiled_fsdp.ranks.question import Signature

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parent.parent
_SOURCES = source_hash(_PACKAGE, _PACKAGE / "passes")  # a link: not followed from above
BUILD = f"torch {torch.__version__}", f"compiled_fsdp of the sources {_SOURCES[:12]}"
"""What all ranks have to run, a line each."""
# Of ``PassContext``, beside functions: what is not known before the passes run, and what is in the key in another form.
_NOT_IN_KEYS = ("summary", "planned", "reads", "groups", "disabled_passes")


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the ranks have agreed on for one topic of a region: see ``Agreement.agree``."""

    topic: str
    collectives: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class CachedCode(PlainData):
    """What is known of code in the cache.

    Attributes:
        decisions: that it was generated under.
        reports: its graphs', each as ``GraphReport.to_json`` writes it.
        plan: what code of another shape needs to follow the plan.
    """

    decisions: tuple[Decision, ...]
    reports: tuple[str, ...]
    plan: AgreedPlan

    def digest(self) -> str:
        """Of what has to be the same on all ranks: the decisions."""
        return hashlib.sha256(repr(self.decisions).encode()).hexdigest()

    def save(self, keys: Sequence[str]) -> None:
        """Keep it, for code with these keys of Inductor's; where the disk is full or not ours, say so and go on."""
        try:
            replace_text(_path(keys), self.to_json(), OURS)
        except OSError as error:
            warn_once(log, "not kept", "compiled code will be compiled again by the next process: %r", error)

    @staticmethod
    def load(keys: Sequence[str]) -> CachedCode | None:
        """What is known of the code with these keys, if anything; raises where it is damaged."""
        path = _path(keys)
        return CachedCode.from_json(path.read_text()) if path.exists() else None


def cache_key(options: Options, region: Region, ctx: PassContext, inputs: Sequence[Any]) -> bytes:
    """What code depends on and Dynamo's graph does not show: our sources, what passes know, and the sizes planned for.

    The same in every process: an option of Inductor's that is an object without a text of its own would bring its
    address, and code would never be found.
    """
    meshes = [(g.name, g.reduce_scatter_name, g.replicate_name, g.mesh_shape) for g in region.groups]
    known = {name: value for name, value in vars(ctx).items() if name not in _NOT_IN_KEYS and not callable(value)}
    groups = dict(ctx.groups)
    adds_in_turn = ctx.may_use_all_to_all and any(len(group.ranks) > 2 for group in region.groups)
    if not (ctx.rules.replicates or adds_in_turn or any(read.backward_group for read in region.reads)):
        groups = {label: dataclasses.replace(group, rank=0) for label, group in groups.items()}  # no graph shows it
    reads = [dataclasses.replace(read, name="") for read in region.reads]
    sizes = [hint(value) for value in inputs if isinstance(value, torch.SymInt)]
    nodes = os.environ.get("LOCAL_WORLD_SIZE")  # on how many the groups of the model's own collectives are
    key = _SOURCES, options, meshes, region.signature(), reads, groups, known, sizes, nodes
    return hashlib.sha256(repr(key).encode()).digest()


def keys_of(found: Sequence[LoadedCode]) -> tuple[str, ...]:
    """Inductor's keys of a compile's graphs, forward first."""
    return tuple(code.key for code in sorted(found, key=lambda code: code.is_backward))


def taken_by_all(
    cached: CachedCode | None, agreement: Agreement, signature: Signature, param_names: Signature, *, is_variant: bool
) -> CachedCode | None:
    """``cached`` if every rank takes code from its cache that was generated under the same decisions; else None.

    A rank that compiles asks the others for their plans, so either all compile or none does. One that compiles a
    variant alone (``is_variant``) asks nobody, and takes what follows the ranks' earlier decisions. Other arguments are
    those of ``Agreement.agree``.
    """
    decisions = cached.decisions if cached is not None else ()
    known = [agreement.decision(signature, decision.topic, decision.collectives) for decision in decisions]
    if any(text not in (None, decision.text) for text, decision in zip(known, decisions, strict=True)):
        cached = None
    if is_variant:
        return None if None in known else cached
    digest = "none" if cached is None else cached.digest()
    if not agreement.have_all_the_same(signature, CACHED_CODE, digest, param_names) or cached is None:
        return None
    for decision in decisions:
        agreement.adopt(signature, decision.topic, decision.collectives, decision.text)
    return cached


def _path(keys: Sequence[str]) -> Path:
    return cache_directory() / "compiled_fsdp" / f"{hashlib.sha256(repr(tuple(keys)).encode()).hexdigest()}.json"
