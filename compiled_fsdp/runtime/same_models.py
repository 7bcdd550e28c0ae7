"""Uncompiled: whether ranks run the same model, asked once, before its first gather.

Collectives of different sizes end a process without a Python error (gloo), or wait for ever. Nobody waits here: the
first rank that comes posts the digest of its model, and the others compare. Compiled, ranks agree on plans and compare
their models there (``compiler/agreement.py``).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections.abc import Iterator

from compiled_fsdp.comm.plain_data import from_json
from compiled_fsdp.sharding.failures import RanksDiffer, problem_key
from compiled_fsdp.sharding.liveness import Liveness, sign_in
from compiled_fsdp.state.outline import difference_of_outlines, outline_of
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of
from compiled_fsdp.state.unit import Unit

_compared: weakref.WeakSet[Unit] = weakref.WeakSet()
# The gather is a collective, so models come to it in one order on all ranks.
_numbers: weakref.WeakKeyDictionary[Liveness, Iterator[int]] = weakref.WeakKeyDictionary()


def check_same_model(parameter: ShardedParameter) -> None:
    """Compare the model of a parameter that is about to be gathered with that of the ranks that were here first.

    Raises:
        RanksDiffer: they run another one.
    """
    root = unit_of(parameter).root
    if root in _compared:
        return
    _compared.add(root)
    liveness = sign_in(parameter.group)
    if not liveness.alone:
        _compare(liveness, outline_of(root.tree_units(), parameter.group))


def _compare(liveness: Liveness, mine: tuple[str, ...]) -> None:
    store, text = liveness.store, json.dumps(mine)
    digest = hashlib.sha256(text.encode()).hexdigest()
    key = f"{liveness.prefix}/model {next(_numbers.setdefault(liveness, itertools.count()))}"
    if not store.check([key]):
        store.set(f"{key}/{digest}", text)
        store.compare_set(key, "", json.dumps([liveness.rank, digest]))
    first, theirs = from_json(tuple[int, str], store.get(key).decode())
    if theirs != digest:
        outline = from_json(tuple[str, ...], store.get(f"{key}/{theirs}").decode())
        ours, others = difference_of_outlines(mine, outline)
        problem = (
            f"compiled_fsdp: ranks run different models. Rank {liveness.rank} of the group has: {ours}; rank {first} "
            f"has: {others}. Every rank must run the same sharded model."
        )
        store.set(problem_key(liveness), problem)
        raise RanksDiffer(problem)
    if store.add(f"{key}/ranks", 1) == liveness.size:  # nobody will ask any more
        for name in (key, f"{key}/{digest}", f"{key}/ranks"):
            store.delete_key(name)
