"""The option ``bucket`` as the user's own plan: lists of patterns of parameter names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any, TypeGuard

from compiled_fsdp.base.errors import CompiledFsdpError
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.passes.plan import Read
from compiled_fsdp.state import registry


class PatternsDiffer(CompiledFsdpError, ValueError):
    """Layers that share compiled code match the patterns of the option ``bucket`` differently."""


def user_buckets(options: Options, region: Region) -> dict[int, int]:
    """Return the bucket of each read in the user's own plan, as a number; reads that match no pattern are left out."""
    if not _is_user_plan(options.bucket):
        return {}
    buckets = {read.index: bucket_of(read.name, options.bucket) for read in region.reads}
    return {index: bucket for index, bucket in buckets.items() if bucket is not None}


def bucket_of(name: str, patterns: Sequence[Sequence[str]]) -> int | None:
    """Return the number of the first list with a pattern that matches a parameter's name; None if none does."""
    return next((i for i, names in enumerate(patterns) if any(fnmatch.fnmatchcase(name, p) for p in names)), None)


def check_patterns_are_used(options: Options, region: Region) -> None:
    """Raise ValueError if a pattern matches no sharded parameter of any model, because it is mistyped."""
    if not region.reads or not _is_user_plan(options.bucket):
        return
    names = [parameter.name for parameter in registry.all_parameters()]
    idle = [p for patterns in options.bucket for p in patterns if not fnmatch.filter(names, p)]
    if idle:
        raise ValueError(
            "compiled_fsdp: option 'bucket': no sharded parameter has a name that matches "
            f"{', '.join(map(repr, idle))}; names here are like {region.reads[0].name!r}."
        )


def check_same_buckets(patterns: Any, reads: Sequence[Read], first_slot: int) -> None:
    """Check that a layer has the same buckets as the layer whose compiled code it shares.

    Args:
        patterns: the option ``bucket``.
        reads: the reads of the compiled code, with the names of the layer that it was compiled for.
        first_slot: the ``param_id`` of the other layer's first parameter.

    Raises:
        PatternsDiffer: the buckets differ; the message has the two names.
    """
    if not _is_user_plan(patterns):
        return
    first = registry.parameter_of(first_slot)
    layer = {p.read_spec.position: p for p in registry.unit_of(first).parameters if p.block == first.block}
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    for read in reads:
        if read.block_number != reads[0].block_number or read.position not in layer:
            continue
        other = layer[read.position]
        buckets = bucket_of(read.name, patterns), bucket_of(other.name, patterns)
        mine, its = (-1 - read.index if bucket is None else bucket for bucket in buckets)  # no pattern matches: alone
        if there.setdefault(mine, its) != its or back.setdefault(its, mine) != mine:
            raise PatternsDiffer(
                f"compiled_fsdp: option 'bucket': {other.name!r} shares compiled code with {read.name!r}, but your "
                "patterns put them with other parameters. Equal layers that a graph break separates need equal "
                "buckets: use patterns that match all of them alike."
            )


def _is_user_plan(bucket: Any) -> TypeGuard[Sequence[Sequence[str]]]:
    return not isinstance(bucket, (str, int, float))
