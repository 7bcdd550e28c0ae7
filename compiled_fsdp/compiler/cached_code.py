"""Code from AOTAutograd's cache: whether all ranks take it, and the facts that are kept beside it for that.

The facts are the ranks' decisions and the reports of the graphs, in one JSON file for each compile. It is named after
Inductor's keys of the lowered graphs, so that it cannot belong to other code, and it is written in one step.
"""

# Why: docs/design/ranks.md, "All ranks take cached code, or none"

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_fsdp.base.files import OURS, check_folder_is_ours, replace_text
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
_SOURCES = source_hash(_PACKAGE, _PACKAGE / "passes")  # the second is a link, which the first does not follow
BUILD = f"torch {torch.__version__}", f"compiled_fsdp of the sources {_SOURCES[:12]}"
"""The versions that must be the same on all ranks, a line each."""
_FOLDER = "compiled_fsdp"  # in the cache folder
# Fields of ``PassContext`` that are not in the key: passes set them, or the key has them in another form. Fields that
# are functions are not in the key either.
_NOT_IN_KEYS = ("summary", "planned", "reads", "groups", "disabled_passes")


@dataclasses.dataclass(frozen=True)
class Decision:
    """The ranks' decision on one topic of a region: see ``Agreement.agree``."""

    topic: str
    collectives: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class CachedCode(PlainData):
    """The facts that are kept beside code in the cache.

    Attributes:
        decisions: the decisions that the code was generated under.
        reports: the reports of its graphs, each as ``GraphReport.to_json`` writes it.
        plan: the plan, for code of another shape that follows it.
    """

    decisions: tuple[Decision, ...]
    reports: tuple[str, ...]
    plan: AgreedPlan

    def digest(self) -> str:
        """Return a hash of the decisions, which must be the same on all ranks."""
        return hashlib.sha256(repr(self.decisions).encode()).hexdigest()

    def save(self, keys: Sequence[str]) -> None:
        """Write the file for code with these keys of Inductor's; if it cannot be written, warn and go on."""
        try:
            replace_text(_path(keys), self.to_json(), OURS)
        except OSError as error:
            warn_once(log, "not kept", "compiled code will be compiled again by the next process: %r", error)

    @staticmethod
    def load(keys: Sequence[str]) -> CachedCode | None:
        """Return the facts about the code with these keys; None if there are none. A damaged file is an error."""
        path = _path(keys)
        return CachedCode.from_json(path.read_text()) if path.exists() else None

    @staticmethod
    def all_in(folder: Path) -> list[CachedCode]:
        """Return the facts about all code in a cache folder."""
        return [CachedCode.from_json(path.read_text()) for path in sorted((folder / _FOLDER).glob("*.json"))]


def cache_key(options: Options, region: Region, ctx: PassContext, inputs: Sequence[Any]) -> bytes:
    """Return a hash of the facts that code depends on and Dynamo's graph does not show.

    They are compiled_fsdp's sources, the facts that passes know, and the sizes that are planned for. The hash is the
    same in every process, unless an option of Inductor's is an object without a text of its own: its address would be
    in the key, and cached code would never be found.
    """
    meshes = [(g.name, g.reduce_scatter_name, g.replicate_name, g.mesh_shape) for g in region.groups]
    known = {name: value for name, value in vars(ctx).items() if name not in _NOT_IN_KEYS and not callable(value)}
    groups = dict(ctx.groups)
    adds_in_turn = ctx.may_use_all_to_all and any(len(group.ranks) > 2 for group in region.groups)
    if not (ctx.rules.replicates or adds_in_turn or any(read.backward_group for read in region.reads)):
        # The text of no graph depends on the rank here.
        groups = {label: dataclasses.replace(group, rank=0) for label, group in groups.items()}
    reads = [dataclasses.replace(read, name="") for read in region.reads]
    sizes = [hint(value) for value in inputs if isinstance(value, torch.SymInt)]
    nodes = os.environ.get("LOCAL_WORLD_SIZE")  # decides how many nodes the model's own collectives span
    key = _SOURCES, options, meshes, region.signature(), reads, groups, known, sizes, nodes
    return hashlib.sha256(repr(key).encode()).digest()


def keys_of(found: Sequence[LoadedCode]) -> tuple[str, ...]:
    """Return Inductor's keys of a compile's graphs, forward first."""
    return tuple(code.key for code in sorted(found, key=lambda code: code.is_backward))


def taken_by_all(
    cached: CachedCode | None,
    agreement: Agreement,
    signature: Signature,
    param_names: Signature,
    *,
    is_variant: bool,
    key: str | None,
) -> tuple[CachedCode | None, bool]:
    """Decide with all ranks whether to take code from their caches.

    A rank that compiles asks the others for their plans, so either all ranks compile or none does. A rank that compiles
    a variant alone (``is_variant``) asks nobody, and takes code that follows the ranks' earlier decisions. The other
    arguments are those of ``Agreement.agree``.

    Args:
        cached: what this rank's cache has.
        key: the cache's key, equal on two ranks if one can run the other's code; None if the cache will have no code.

    Returns:
        ``cached``, if every rank takes code that was generated under the same decisions; else None. And whether no rank
        has code, but each could run any other's.
    """
    decisions = cached.decisions if cached is not None else ()
    known = [agreement.decision(signature, decision.topic, decision.collectives) for decision in decisions]
    if any(text not in (None, decision.text) for text, decision in zip(known, decisions, strict=True)):
        cached = None
    if is_variant:
        return (None if None in known else cached), False
    same = agreement.have_all_the_same(
        signature, CACHED_CODE, f"none, but for {key}" if cached is None else cached.digest(), param_names
    )
    if not same or cached is None:
        return None, same and cached is None and key is not None
    for decision in decisions:
        agreement.adopt(signature, decision.topic, decision.collectives, decision.text)
    return cached, False


def _path(keys: Sequence[str]) -> Path:
    return cache_directory() / _FOLDER / f"{hashlib.sha256(repr(tuple(keys)).encode()).hexdigest()}.json"


def checked_cache_folder() -> Path:
    """Return Inductor's cache folder, which is made if it is missing.

    Raises:
        OSError: it cannot be made.
        ValueError: other users can write to it.
    """
    folder = cache_directory()
    try:
        check_folder_is_ours(folder)
    except OSError as error:
        raise OSError(no_writing(error)) from error
    return folder


def no_writing(error: OSError) -> str:
    """The message about a cache folder that cannot be written to."""
    return (
        f"compiled_fsdp: cannot write to Inductor's cache folder: {error}. Set TORCHINDUCTOR_CACHE_DIR to a folder "
        "that this user can write to."
    )
