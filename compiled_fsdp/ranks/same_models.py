"""Uncompiled: whether ranks run the same model, asked once, before its first gather.

Collectives of different sizes end a process without a Python error (gloo), or wait for ever. Nobody waits here: the
first rank that comes posts the digest of its model, and the others compare. Compiled, ranks agree on plans and compare
their models there (``ranks/agreement.py``).
"""

# Why: docs/design.md, note N65

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections import defaultdict
from collections.abc import Iterator

from compiled_fsdp.base.plain_data import from_json
from compiled_fsdp.compat.graphs import fake_mode_is_active
from compiled_fsdp.ranks.failures import RanksDiffer, problem_key
from compiled_fsdp.ranks.liveness import Liveness, sign_in
from compiled_fsdp.ranks.outline import difference_of_outlines, outline_of
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import Unit

_compared: weakref.WeakSet[Unit] = weakref.WeakSet()
# Of which a gather has ended since: every rank has signed in.
_gathered: weakref.WeakSet[Unit] = weakref.WeakSet()
# How often something was said of each subject. The gather is a collective, so models come to it in one order on all
# ranks; models that are made again have parameters of the same names.
_numbers: weakref.WeakKeyDictionary[Liveness, defaultdict[str, Iterator[int]]] = weakref.WeakKeyDictionary()


def check_same_model(parameter: ShardedParameter) -> None:
    """Compare the model of a parameter that is about to be gathered with that of the ranks that were here first.

    Raises:
        RanksDiffer: they run another one.
    """
    root = unit_of(parameter).root
    if root in _gathered or fake_mode_is_active():  # of fake tensors nothing is gathered, and others may not be here
        return
    liveness = sign_in(parameter.group)
    if root in _compared:  # gathers outside of graphs end before the next one begins
        _gathered.add(root)
        liveness.look()
        return
    _compared.add(root)
    if not liveness.alone:
        _compare(liveness, outline_of(root.tree_units(), parameter.group))
        liveness.look()  # at those who are here: the store may be gone at the next gather


def compare_how_hooks_run(parameter: ShardedParameter, *, in_graph: bool) -> str:
    """Compare where a parameter's all-gather extensions run first, in a graph or in eager code, with other ranks.

    A hook that one rank alone cannot trace would let it wait in a collective, and the others in the agreement on a
    plan. Where they run later is not compared: ranks may trace anew at times of their own.

    Returns:
        What is wrong; "" if nothing is, or if nobody was here before.
    """
    if parameter.hooks_are_compared:
        return ""
    parameter.hooks_are_compared = True
    liveness = sign_in(parameter.group)
    if liveness.alone:
        return ""
    mine = "in a graph" if in_graph else "in eager code"
    found = _first_to_say(liveness, f"hooks {parameter.name}", mine)
    if found is None:
        return ""
    rank, theirs = found
    problem = (
        f"compiled_fsdp: ranks run the all-gather extensions of parameter {parameter.name!r} in different places: rank "
        f"{liveness.rank} of the group {mine}, rank {rank} {theirs}. A hook that cannot be traced on one rank, such as "
        "one that looks at values, must not be traced on any."
    )
    liveness.store.set(problem_key(liveness), problem)
    return problem


def _compare(liveness: Liveness, mine: tuple[str, ...]) -> None:
    found = _first_to_say(liveness, "model", json.dumps(mine))
    if found is None:
        return
    first, theirs = found
    ours, others = difference_of_outlines(mine, from_json(tuple[str, ...], theirs))
    problem = (
        f"compiled_fsdp: ranks run different models. Rank {liveness.rank} of the group has: {ours}; rank {first} "
        f"has: {others}. Every rank must run the same sharded model."
    )
    liveness.store.set(problem_key(liveness), problem)
    raise RanksDiffer(problem)


def _first_to_say(liveness: Liveness, subject: str, text: str) -> tuple[int, str] | None:
    """The first rank that came with ``subject`` and its text, if that is not this rank's ``text``; nobody waits."""
    store, digest = liveness.store, hashlib.sha256(text.encode()).hexdigest()
    number = next(_numbers.setdefault(liveness, defaultdict(itertools.count))[subject])
    key = f"{liveness.prefix}/{subject} {number}"
    if not store.check([key]):
        store.set(f"{key}/{digest}", text)
        store.compare_set(key, "", json.dumps([liveness.rank, digest]))
    first, theirs = from_json(tuple[int, str], store.get(key).decode())
    if theirs != digest:
        return first, store.get(f"{key}/{theirs}").decode()
    if store.add(f"{key}/ranks", 1) == liveness.size:  # nobody will ask any more
        for name in (key, f"{key}/{digest}", f"{key}/ranks"):
            store.delete_key(name)
    return None
