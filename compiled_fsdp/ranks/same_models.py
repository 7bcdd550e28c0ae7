"""A check that ranks run the same model in uncompiled code, once, before the model's first gather.

If every rank has whole parameters (``replicate``), there is no gather, and the first reduction takes its place.

Without the check, collectives of different sizes would end a process without a Python error (gloo), or would wait
forever. No rank waits in the check: the first rank that comes posts its model, and the others compare. In compiled code
the ranks compare their models when they agree on plans (``ranks/agreement.py``).
"""

# Why: docs/design/ranks.md, "Ranks compare once where extensions run"

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

# The root units of the models that were compared.
_compared: weakref.WeakSet[Unit] = weakref.WeakSet()
# Those of which a gather has ended since, so that every rank has signed in.
_gathered: weakref.WeakSet[Unit] = weakref.WeakSet()
# How often this rank has come with each subject. The number tells models with equal names apart. It is the same on all
# ranks, because models are compared before a gather, and gathers are collectives, in one order on all ranks.
_numbers: weakref.WeakKeyDictionary[Liveness, defaultdict[str, Iterator[int]]] = weakref.WeakKeyDictionary()


def check_same_model(parameter: ShardedParameter) -> None:
    """Compare the model of a parameter that is about to be sent with the model of the first rank that came here.

    Raises:
        RanksDiffer: that rank runs another model.
    """
    root = unit_of(parameter).root
    if root in _gathered or fake_mode_is_active():  # fake tensors are not gathered, and other ranks may not be here
        return
    liveness = sign_in(parameter.group)
    if root in _compared:  # a gather has ended, because outside of graphs a gather ends before the next one begins
        _gathered.add(root)
        liveness.look()
        return
    _compared.add(root)
    if not liveness.alone:
        _compare(liveness, outline_of(root.tree_units(), parameter.group))
        liveness.look()  # at the ranks that are here, because the store may be gone at the next gather


def compare_how_hooks_run(parameter: ShardedParameter, *, in_graph: bool) -> str:
    """Compare with other ranks where a parameter's all-gather extensions run first: in a graph or in eager code.

    If only one rank cannot trace an extension, that rank would wait in a collective, and the other ranks would wait in
    the agreement on a plan. Later runs are not compared, because ranks may trace again at different times.

    Returns:
        The problem; "" if there is none, or if this rank is the first.
    """
    if parameter.hooks.are_compared:
        return ""
    parameter.hooks.are_compared = True
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
    """The first rank that came with ``subject``, and its text; None if its text is ``text``. No rank waits."""
    store, digest = liveness.store, hashlib.sha256(text.encode()).hexdigest()
    number = next(_numbers.setdefault(liveness, defaultdict(itertools.count))[subject])
    key = f"{liveness.prefix}/{subject} {number}"
    if not store.check([key]):
        store.set(f"{key}/{digest}", text)
        store.compare_set(key, "", json.dumps([liveness.rank, digest]))
    first, theirs = from_json(tuple[int, str], store.get(key).decode())
    if theirs != digest:
        return first, store.get(f"{key}/{theirs}").decode()
    if store.add(f"{key}/ranks", 1) == liveness.size:  # all ranks have compared
        for name in (key, f"{key}/{digest}", f"{key}/ranks"):
            store.delete_key(name)
    return None
