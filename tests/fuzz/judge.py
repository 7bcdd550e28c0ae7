"""Judge whether compiled_fsdp runs a program right. FSDP2 and the unsharded model tell whose fault a difference is."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from dataclasses import dataclass

from tests.fuzz import mutations
from tests.fuzz.equality import (
    Notes,
    difference,
    has_plain,
    is_exact,
    is_nearer,
    is_right,
    limit_of,
    relative,
    steps_twice,
)
from tests.fuzz.generate import BUDGETS
from tests.fuzz.layers import KINDS
from tests.fuzz.program import Program
from tests.fuzz.source import COMPILED, source_of
from tests.harness.cases import Pool
from tests.harness.spawn import RankFailure

TIMEOUT = 1200.0
"""Seconds after which a program counts as hung, on a machine with other work."""
ASLEEP = 30.0
"""Seconds of sleep of all its ranks after which a program counts as hung."""
ASLEEP_COMPILING = 180.0
"""The same limit with Inductor, whose compiler is another process: ranks sleep while it runs."""

AMPLIFIED = 1e-3
"""The largest error that counts as amplified rounding: compiled_fsdp's difference from the unsharded model, relative to
the largest element. It counts if FSDP2 differs from the unsharded model, too, or if the unsharded model differs as much
from itself when the last bit of its parameters changes."""

AFTER_OTHERS = "after the programs before it"

REFUSALS = {
    r"second derivative": "no second derivatives through a parameter",
    r"option 'bucket': .* shares compiled code with": "a list of buckets that tells equal layers apart",
    r"option 'bucket': no sharded parameter has a name that matches": "a list of buckets with names that are not there",
    r"pending gradient from earlier microbatches": "microbatches, hooks and a reentrant checkpoint's backward",
}
"""Deliberate refusals of compiled_fsdp, although FSDP2 runs the program or has no such option: patterns of messages,
and the refused feature (docs/differences.md, docs/graph-breaks.md, or the option's docstring)."""


class Kind(enum.Enum):
    """The result of a program. All after `REFUSED` are findings."""

    RIGHT = "right"
    FSDP2 = "FSDP2's"
    """compiled_fsdp is equal to the unsharded model; FSDP2 is not, or fails."""
    TORCH = "torch's"
    """The unsharded model has the same fault under torch's own backend."""
    REFUSED = "refused by all"
    """FSDP2 or the unsharded model fails, too, or docs/differences.md has the refusal."""
    WRONG = "wrong"
    INEXACT = "not bit for bit"
    ERROR = "error"
    HANG = "hang"


FINDINGS = (Kind.WRONG, Kind.INEXACT, Kind.ERROR, Kind.HANG)


@dataclass(frozen=True)
class Verdict:
    """A program's result: its kind, and a line about it.

    `text` has tracebacks and stacks. `other` is the way that compiled_fsdp was compared with.
    """

    kind: Kind
    about: str = ""
    text: str = ""
    other: str = "fsdp2"

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS

    @property
    def sort(self) -> str:
        """The part of a finding that must stay the same while it shrinks: kind, and an error's type and first words."""
        return f"{self.kind.value} {re.sub(r'[0-9]+', '#', self.about)[:60] if self.kind is Kind.ERROR else ''}"


@dataclass(frozen=True)
class _Failed:
    """The failure of a way: an error or a hang."""

    hangs: bool
    about: str
    text: str


class Judge:
    """Runs programs in processes that stay until one fails.

    Args:
        pool: the processes.
        mutation: a name in `mutations.MUTATIONS`, or "".
        shares: whether consecutive programs with the same model share compiled code.
    """

    def __init__(self, pool: Pool, mutation: str = "", shares: bool = False) -> None:
        self.pool, self.mutation, self.shares = pool, mutation, shares

    def verdict(self, program: Program) -> Verdict:
        """Run a program in each way that is needed, and compare. A finding with compiled code of earlier programs is
        run again without that code.
        """
        verdict = self._verdict(program)
        if not (self.shares and verdict.is_finding):
            return verdict
        alone = Judge(self.pool, self.mutation)._verdict(program)
        if alone.is_finding:
            return alone
        return dataclasses.replace(verdict, about=f"{AFTER_OTHERS}: {verdict.about}")

    def _verdict(self, program: Program) -> Verdict:
        text = source_of(program)
        ours = self._way(program, text, "ours")
        if _cannot_be(program):
            if not isinstance(ours, _Failed):
                return Verdict(Kind.WRONG, "a budget of 120 bytes is kept")
            if "memory_budget" in ours.text:
                return Verdict(Kind.RIGHT, ours.about)
        if _may_be_refused(program) and isinstance(ours, _Failed) and "'memory_budget'" in ours.text:
            return Verdict(Kind.RIGHT, ours.about)
        fsdp2 = self._way(program, text, "fsdp2")
        if isinstance(ours, _Failed):
            return self._of_failure(program, text, ours, fsdp2)
        limit = limit_of(program)
        if isinstance(fsdp2, _Failed):
            plain = self._way(program, text, "plain")
            if isinstance(plain, _Failed):
                return Verdict(Kind.REFUSED, f"ours alone runs; FSDP2: {fsdp2.about}")
            wrong = self._from_plain(program, text, ours, plain)
            return self._unless_torchs(program, text, plain, wrong) if wrong else Verdict(Kind.FSDP2, fsdp2.about)
        wrong = difference(ours, fsdp2, 0.0 if is_exact(program) else limit)
        if wrong is None:
            return Verdict(Kind.RIGHT)
        plain = self._way(program, text, "plain")
        if difference(ours, fsdp2, limit) is None:
            if not isinstance(plain, _Failed) and is_nearer(program, ours, fsdp2, plain):
                return Verdict(Kind.FSDP2, wrong)
            return self._unless_torchs(program, text, plain, Verdict(Kind.INEXACT, f"FSDP2: {wrong}"))
        if isinstance(plain, _Failed):
            return Verdict(Kind.WRONG, f"FSDP2: {wrong}")
        if is_right(program, ours, fsdp2, plain) or steps_twice(program, ours, fsdp2, plain):
            return Verdict(Kind.FSDP2, wrong)
        if has_plain(program) and (
            (difference(fsdp2, plain, limit) and not difference(ours, plain, AMPLIFIED))
            or self._amplifies(program, text, ours, plain)
        ):
            return Verdict(Kind.RIGHT, f"rounding, which the program amplifies: {wrong}")
        if self._is_narrow(program, ours, fsdp2):
            return Verdict(Kind.RIGHT, f"rounding in the policy's dtypes: {wrong}")
        return self._unless_torchs(program, text, plain, Verdict(Kind.WRONG, f"FSDP2: {wrong}"))

    def _way(self, program: Program, text: str, way: str) -> Notes | _Failed:
        asleep = ASLEEP_COMPILING if program.mode == "inductor" else ASLEEP
        # If these processes do not start, the fuzzer has failed, not the program. Uncompiled ways have their own
        # processes, so that a failure there does not end the processes that have compiled code.
        ranks = self.pool.get(program.world, "" if way in COMPILED else "uncompiled")
        try:
            return ranks.run(mutations.run, text, way, self.mutation, self.shares, timeout=TIMEOUT, asleep=asleep)
        except RankFailure as failure:
            return _failed(str(failure))

    def _of_failure(self, program: Program, text: str, ours: _Failed, fsdp2: Notes | _Failed) -> Verdict:
        # in eager mode ranks follow no common plan: mismatched collectives hang or abort, depending on the timing
        by_chance = program.mode == "eager" and any(step.odd >= 0 for step in program.steps)
        if isinstance(fsdp2, _Failed) and (by_chance or fsdp2.hangs == ours.hangs):
            return Verdict(Kind.REFUSED, f"{ours.about}; FSDP2: {fsdp2.about}")
        for pattern, why in REFUSALS.items():
            if re.search(pattern, ours.text):
                return Verdict(Kind.REFUSED, why)
        if "in a checkpoint on all ranks or on none" in ours.text and _checkpoints_differ(program):
            return Verdict(Kind.REFUSED, "under compiled autograd, a checkpoint on some ranks only")
        if ("RanksDiffer" in ours.about or ours.hangs) and _breaks_in_a_checkpoint(program):
            return Verdict(Kind.REFUSED, "a checkpoint around several compiled graphs on some ranks only")
        if program.mode == "torch's aot_eager" and "non-empty donated buffers" in ours.text:
            return Verdict(Kind.TORCH, ours.about)  # its first backward did not retain the graph, a later one does
        if program.mode == "dynamic" and program.mesh == "TP" and "RecursionError" in ours.about:
            # torch.compile alone has this error with a ColwiseParallel layer and a symbolic length (torch 2.13 and
            # 2.15); the ways below cannot show it, because they have no tensor parallelism
            return Verdict(Kind.TORCH, ours.about)
        for way in ("torch", "partitioned") if program.mode != "eager" else ():
            if isinstance(self._way(program, text, way), _Failed):
                return Verdict(Kind.TORCH, ours.about)
        return Verdict(Kind.HANG if ours.hangs else Kind.ERROR, ours.about, ours.text)

    def _from_plain(self, program: Program, text: str, ours: Notes, plain: Notes) -> Verdict | None:
        if not has_plain(program):
            return None
        wrong = difference(ours, plain, limit_of(program))
        if wrong is None or self._amplifies(program, text, ours, plain):
            return None
        return Verdict(Kind.WRONG, f"unsharded: {wrong}", other="plain")

    def _amplifies(self, program: Program, text: str, ours: Notes, plain: Notes) -> bool:
        """Whether the unsharded model with a last bit more in its parameters is about as far off as compiled_fsdp."""
        nudged = self._way(program, text, "nudged")
        if isinstance(nudged, _Failed):
            return False
        off = max(relative(one[name], two[name]) for one, two in zip(nudged, plain, strict=True) for name in two)
        return difference(ours, plain, min(AMPLIFIED, 16 * off)) is None

    def _is_narrow(self, program: Program, ours: Notes, fsdp2: Notes) -> bool:
        """Whether only values differ, sums have another order, and with a float32 policy compiled_fsdp equals FSDP2.

        For example, if three ranks' gradients cancel, their sum is only as large as their rounding in bfloat16.
        """
        if not program.policy or is_exact(program) or difference(ours, fsdp2, math.inf) is not None:
            return False
        policy, root_policy = (_with_float32(text) for text in (program.policy, program.root_policy))
        wide = dataclasses.replace(program, policy=policy, root_policy=root_policy)
        ways = [self._way(wide, source_of(wide), way) for way in ("ours", "fsdp2")]
        return not any(isinstance(way, _Failed) for way in ways) and not difference(*ways, AMPLIFIED)

    def _unless_torchs(self, program: Program, text: str, plain: Notes | _Failed, verdict: Verdict) -> Verdict:
        """Return the verdict, or one of `TORCH` if torch's own backend changes the unsharded model's values as much."""
        if program.mode == "eager" or isinstance(plain, _Failed):
            return verdict
        torchs = self._way(program, text, "torch")
        if isinstance(torchs, _Failed):
            is_torchs = verdict.kind is Kind.WRONG and self._is_reentrant_in_graph(program)
            return Verdict(Kind.TORCH, verdict.about) if is_torchs else verdict
        wrong = difference(torchs, plain, 0.0 if verdict.kind is Kind.INEXACT else limit_of(program))
        return Verdict(Kind.TORCH, wrong) if wrong else verdict

    def _is_reentrant_in_graph(self, program: Program) -> bool:
        """Whether compiled_fsdp equals FSDP2 with plain checkpoints instead of reentrant ones, as they are in a graph.

        In eager code a reentrant checkpoint whose input needs no gradient gives its parameters no gradients.
        """
        layers = tuple(
            dataclasses.replace(layer, checkpoint="plain") if layer.checkpoint else layer for layer in program.layers
        )
        if layers == program.layers:
            return False
        other = dataclasses.replace(program, layers=layers)
        ways = self._way(program, source_of(program), "ours"), self._way(other, source_of(other), "fsdp2")
        return not any(isinstance(way, _Failed) for way in ways) and not difference(*ways, limit_of(program))


def _failed(text: str) -> _Failed:
    ended = re.findall(r"^rank \d+: (?!ok|was still running)", text, re.MULTILINE)
    errors = re.findall(r"^(\w[\w.]*(?:Error|Exception|Ended|Differ|Unsupported|Failed)\b.*)$", text, re.MULTILINE)
    stacks = re.findall(r'Current thread .*\n  File "[^"]*?([\w/]+\.py)", line \d+ in (\w+)', text)
    stacks += re.findall(r'File "[^"]*/(compiled_fsdp/[\w/]+\.py)", line \d+ in (\w+)', text)
    place = "; ".join(f"{file} {name}" for file, name in dict.fromkeys(stacks[:6]))
    about = (errors[-1] if errors else text.strip().splitlines()[-1]) if ended else f"hangs at {place}"
    return _Failed(not ended, about[:300], text)


def _with_float32(policy: str) -> str:
    return re.sub(r"torch\.b?float16", "torch.float32", policy)


def _checkpoints_differ(program: Program) -> bool:
    """Whether a layer is in a checkpoint on some ranks only."""
    layer = program.layers[program.calls[program.other_at]]
    differ = layer.checkpoint != "" or program.other == "checkpointed"
    return differ and any(step.odd >= 0 for step in program.steps)


def _breaks_in_a_checkpoint(program: Program) -> bool:
    """Whether that layer has a graph break, too (docs/differences.md, "Ranks that run different code")."""
    layer = program.layers[program.calls[program.other_at]]
    texts = [KINDS[each.kind].forward for each in program.every_layer(layer)]
    return _checkpoints_differ(program) and any("graph_break" in text or ".item()" in text for text in texts)


def _may_be_refused(program: Program) -> bool:
    """Whether a program has a budget that may be too small for it."""
    return dict(program.options).get("memory_budget") in BUDGETS


def _cannot_be(program: Program) -> bool:
    """Whether compiled_fsdp has to refuse the memory budget: its backend plans under it, and some step trains.

    If all layers are checkpoints around old weight norms, no graph has a read, because a hook sets an attribute there;
    but a head or an embedding has one.
    """
    outside = program.head or program.tokens
    if not outside and all(layer.kind == "old weight norm" and layer.checkpoint for layer in program.layers):
        return False
    return program.mode not in ("eager", "torch's aot_eager") and ("memory_budget", "120") in program.options
