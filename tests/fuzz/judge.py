"""Whether a program ran right: ours against FSDP2 and the unsharded model, so that each one's faults are told apart."""

from __future__ import annotations

import dataclasses
import enum
import re
from dataclasses import dataclass

import torch

from tests.fuzz import execute, mutations
from tests.fuzz.program import Program
from tests.fuzz.source import COMPILED, source_of
from tests.harness.cases import Pool
from tests.harness.spawn import RankFailure

TIMEOUT = 1200.0
"""Seconds after which a program hangs, on a machine that others use as well."""
ASLEEP = 30.0
"""Seconds after which a program hangs whose ranks all sleep."""
ASLEEP_COMPILING = 180.0
"""The same with Inductor, whose compiler is another process."""

ROUNDING = 2e-5
"""Of float32, relative to the largest element, after a few steps."""
AMPLIFIED = 1e-3
"""How far ours may be from the unsharded model, relative to the largest element, where FSDP2 is not equal to it too, or
the unsharded model itself is as far off with a last bit more in its parameters."""

AFTER_OTHERS = "after the programs before it"

REFUSALS = {
    r"second derivative": "no second derivatives through a parameter",
    r"option 'bucket': .* shares compiled code with": "a list of buckets that tells equal layers apart",
    r"option 'bucket': no sharded parameter has a name that matches": "a list of buckets with names that are not there",
    r"wait from earlier microbatches, and its hooks": "microbatches, hooks and a reentrant checkpoint's backward",
}
"""What ours refuses by name where FSDP2 does it or has no such option: patterns of messages, and why
(docs/differences.md, docs/graph-breaks.md, or the option's docstring)."""


class Kind(enum.Enum):
    """What came out of a program. All after `REFUSED` are findings."""

    RIGHT = "right"
    FSDP2 = "FSDP2's"
    """Ours is equal to the unsharded model, FSDP2 is not, or fails."""
    TORCH = "torch's"
    """The unsharded model does the same under torch's own backend."""
    REFUSED = "refused by all"
    """FSDP2 or the unsharded model fails, too; or a refusal that docs/differences.md has."""
    WRONG = "wrong"
    INEXACT = "not bit for bit"
    ERROR = "error"
    HANG = "hang"


FINDINGS = (Kind.WRONG, Kind.INEXACT, Kind.ERROR, Kind.HANG)


@dataclass(frozen=True)
class Verdict:
    """What came out, in a line; `text` has tracebacks and stacks; `other` is whom ours was compared with."""

    kind: Kind
    about: str = ""
    text: str = ""
    other: str = "fsdp2"

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS

    @property
    def sort(self) -> str:
        """What stays the same while a finding shrinks: its kind, and an error's type and first words."""
        return f"{self.kind.value} {re.sub(r'[0-9]+', '#', self.about)[:60] if self.kind is Kind.ERROR else ''}"


@dataclass(frozen=True)
class _Failed:
    """A way that did not end."""

    hangs: bool
    about: str
    text: str


Notes = list[execute.Notes]  # by rank


class Judge:
    """Runs programs in processes that stay until one fails.

    Args:
        pool: the processes.
        mutation: of `mutations.MUTATIONS`, or "".
        shares: whether programs with one model that follow each other share what is compiled.
    """

    def __init__(self, pool: Pool, mutation: str = "", shares: bool = False) -> None:
        self.pool, self.mutation, self.shares = pool, mutation, shares

    def verdict(self, program: Program) -> Verdict:
        """Run a program each way that is needed, and compare. What is found with code of the programs before is looked
        for without it, too.
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
        if _cannot_be(program):
            ours = self._way(program, text, "ours")
            if isinstance(ours, _Failed) and "memory_budget" in ours.text:
                return Verdict(Kind.RIGHT, ours.about)
            return Verdict(
                Kind.WRONG, "a budget of 120 bytes is kept", "" if not isinstance(ours, _Failed) else ours.text
            )
        ours, fsdp2 = (self._way(program, text, way) for way in ("ours", "fsdp2"))
        if isinstance(ours, _Failed):
            return self._of_failure(program, text, ours, fsdp2)
        limit = _limit(program)
        if isinstance(fsdp2, _Failed):
            plain = self._way(program, text, "plain")
            if isinstance(plain, _Failed):
                return Verdict(Kind.REFUSED, f"ours alone runs; FSDP2: {fsdp2.about}")
            wrong = self._from_plain(program, text, ours, plain)
            return self._unless_torchs(program, text, plain, wrong) if wrong else Verdict(Kind.FSDP2, fsdp2.about)
        wrong = difference(ours, fsdp2, 0.0 if _is_exact(program) else limit)
        if wrong is None:
            return Verdict(Kind.RIGHT)
        plain = self._way(program, text, "plain")
        if difference(ours, fsdp2, limit) is None:
            if _is_nearer(program, ours, fsdp2, plain):
                return Verdict(Kind.FSDP2, wrong)
            return self._unless_torchs(program, text, plain, Verdict(Kind.INEXACT, f"FSDP2: {wrong}"))
        if isinstance(plain, _Failed):
            return Verdict(Kind.WRONG, f"FSDP2: {wrong}")
        if _is_right(program, ours, fsdp2, plain) or _left_by_fsdp2(program, ours, fsdp2, plain):
            return Verdict(Kind.FSDP2, wrong)
        if _has_plain(program) and (
            (difference(fsdp2, plain, limit) and not difference(ours, plain, AMPLIFIED))
            or self._amplifies(program, text, ours, plain)
        ):
            return Verdict(Kind.RIGHT, f"rounding, which the program amplifies: {wrong}")
        return self._unless_torchs(program, text, plain, Verdict(Kind.WRONG, f"FSDP2: {wrong}"))

    def _way(self, program: Program, text: str, way: str) -> Notes | _Failed:
        asleep = ASLEEP_COMPILING if program.mode == "inductor" else ASLEEP
        # Where these do not start the fuzzer has failed, not the program. What FSDP2 or a plain model fails at does not
        # end the processes that have our compiled code.
        ranks = self.pool.get(program.world, "" if way in COMPILED else "uncompiled")
        try:
            return ranks.run(mutations.run, text, way, self.mutation, self.shares, timeout=TIMEOUT, asleep=asleep)
        except RankFailure as failure:
            return _failed(str(failure))

    def _of_failure(self, program: Program, text: str, ours: _Failed, fsdp2: Notes | _Failed) -> Verdict:
        # uncompiled, ranks follow no plan: mismatched collectives hang or abort, as the timing has it
        by_chance = program.mode == "eager" and any(step.odd >= 0 for step in program.steps)
        if isinstance(fsdp2, _Failed) and (by_chance or fsdp2.hangs == ours.hangs):
            return Verdict(Kind.REFUSED, f"{ours.about}; FSDP2: {fsdp2.about}")
        for pattern, why in REFUSALS.items():
            if re.search(pattern, ours.text):
                return Verdict(Kind.REFUSED, why)
        if program.mode == "torch's aot_eager" and "non-empty donated buffers" in ours.text:
            return Verdict(Kind.TORCH, ours.about)  # its first backward was in no graph that is retained
        for way in ("torch", "partitioned") if program.mode != "eager" else ():
            if isinstance(self._way(program, text, way), _Failed):
                return Verdict(Kind.TORCH, ours.about)
        return Verdict(Kind.HANG if ours.hangs else Kind.ERROR, ours.about, ours.text)

    def _from_plain(self, program: Program, text: str, ours: Notes, plain: Notes) -> Verdict | None:
        if not _has_plain(program):
            return None
        wrong = difference(ours, plain, _limit(program))
        if wrong is None or self._amplifies(program, text, ours, plain):
            return None
        return Verdict(Kind.WRONG, f"unsharded: {wrong}", other="plain")

    def _amplifies(self, program: Program, text: str, ours: Notes, plain: Notes) -> bool:
        """Whether the unsharded model, with a last bit more in its parameters, is about as far off as ours."""
        nudged = self._way(program, text, "nudged")
        if isinstance(nudged, _Failed):
            return False
        off = max(_relative(one[name], two[name]) for one, two in zip(nudged, plain, strict=True) for name in two)
        return difference(ours, plain, min(AMPLIFIED, 16 * off)) is None

    def _unless_torchs(self, program: Program, text: str, plain: Notes | _Failed, verdict: Verdict) -> Verdict:
        """The verdict, unless torch's own backend changes the unsharded model's values as much."""
        if program.mode == "eager" or isinstance(plain, _Failed):
            return verdict
        torchs = self._way(program, text, "torch")
        if isinstance(torchs, _Failed):
            is_torchs = verdict.kind is Kind.WRONG and self._is_reentrant_in_graph(program)
            return Verdict(Kind.TORCH, verdict.about) if is_torchs else verdict
        wrong = difference(torchs, plain, 0.0 if verdict.kind is Kind.INEXACT else _limit(program))
        return Verdict(Kind.TORCH, wrong) if wrong else verdict

    def _is_reentrant_in_graph(self, program: Program) -> bool:
        """Whether ours does what FSDP2 does with other checkpoints in the place of reentrant ones, as a graph has them.

        Of an input that needs no gradient a reentrant one gives its parameters none.
        """
        layers = tuple(
            dataclasses.replace(layer, checkpoint="plain") if layer.checkpoint else layer for layer in program.layers
        )
        if layers == program.layers:
            return False
        other = dataclasses.replace(program, layers=layers)
        ways = self._way(program, source_of(program), "ours"), self._way(other, source_of(other), "fsdp2")
        return not any(isinstance(way, _Failed) for way in ways) and not difference(*ways, _limit(program))


def _failed(text: str) -> _Failed:
    ended = re.findall(r"^rank \d+: (?!ok|was still running)", text, re.MULTILINE)
    errors = re.findall(r"^(\w[\w.]*(?:Error|Exception|Ended|Differ|Unsupported|Failed)\b.*)$", text, re.MULTILINE)
    stacks = re.findall(r'Current thread .*\n  File "[^"]*?([\w/]+\.py)", line \d+ in (\w+)', text)
    stacks += re.findall(r'File "[^"]*/(compiled_fsdp/[\w/]+\.py)", line \d+ in (\w+)', text)
    place = "; ".join(f"{file} {name}" for file, name in dict.fromkeys(stacks[:6]))
    about = (errors[-1] if errors else text.strip().splitlines()[-1]) if ended else f"hangs at {place}"
    return _Failed(not ended, about[:300], text)


# ---- what is equal ---------------------------------------------------------------------------------------------------
def _is_exact(program: Program) -> bool:
    """Whether ours and FSDP2 do the same arithmetic: docs/differences.md says where not."""
    stale = program.writes and any("forward_prefetch" in call for call in program.sharding)
    evaluates = any(step.kind in ("evaluate", "inference") for step in program.steps)
    ranks_added = program.world if program.mesh != "TP" else 2
    order = (
        program.mode in ("inductor", "dynamic")
        or any(step.forwards > 1 for step in program.steps)  # each forward's gradients are reduced, then added
        or len(set(program.calls)) < len(program.calls)
        or any(
            layer.kind in ("twice", "tied", "cell", "disabled", "softmax", "recomputed")
            for layer in program.every_layer()
        )
        or (program.tokens and program.head == "tied")
        # what waits for the replicas is divided before or after the last is added, and a third is rounded
        or (
            any("divide_factor" in call for call in program.sharding) and any(s.sync == "shards" for s in program.steps)
        )
        or stale  # what FSDP2 prefetches, it uses, whatever is written to it by then
        # a unit's input is returned, too: FSDP2 adds its gradients in another order (see _is_nearer), and with a policy
        # no unsharded model has the same digits to tell
        or (program.policy and program.output == "middle")
        # likewise where one rank's other code reads a unit's input, too: the unsharded model is as near to both
        or program.other in ("scaled", "first row")
        # a reentrant checkpoint's backward ends before the one around it, and reduces what waits
        or (
            program.mode == "compiled autograd"
            and any(step.microbatches > 1 for step in program.steps)
            and any(layer.checkpoint == "reentrant" for layer in program.every_layer())
        )
        # the last bit of a recurrent layer's output without gradients is not always the plain module's
        or (evaluates and any(layer.kind in ("gru", "lstm") for layer in program.every_layer()))
        # read twice: torch's backends reduce each read's gradient
        or (program.mode == "torch's aot_eager" and any(layer.kind == "listed" for layer in program.every_layer()))
    )
    return ranks_added == 2 and not order


def _cannot_be(program: Program) -> bool:
    """Whether the memory budget has to be refused: our backend plans under it, and some step trains.

    Of nothing but checkpoints around old weight norms, whose hooks set an attribute in them, no graph has a read.
    """
    if all(layer.kind == "old weight norm" and layer.checkpoint for layer in program.layers):
        return False
    return program.mode not in ("eager", "torch's aot_eager") and ("memory_budget", "120") in program.options


def _limit(program: Program) -> float:
    """Relative to the largest element. Narrow dtypes round, and normalized weights amplify."""
    low = program.policy or any(
        layer.dtype == "bfloat16" or layer.kind == "autocast" for layer in program.every_layer()
    )
    return 0.1 if low else ROUNDING


def _has_plain(program: Program) -> bool:
    """Whether the unsharded model computes the same: it has no policy."""
    return not program.policy


def _is_nearer(program: Program, ours: Notes, fsdp2: Notes, plain: Notes | _Failed) -> bool:
    """Whether ours is equal to the unsharded model, bit for bit or but for rounding in float32, and FSDP2 is not.

    FSDP2's hooks are autograd nodes around each unit: where other code reads a unit's input, too, it adds their
    gradients in another order.
    """
    if isinstance(plain, _Failed) or not _has_plain(program):
        return False
    return any(
        difference(ours, plain, limit) is None and difference(fsdp2, plain, limit) is not None
        for limit in (0.0, ROUNDING)
    )


def _is_right(program: Program, ours: Notes, fsdp2: Notes, plain: Notes) -> bool:
    """Whether ours is equal to the unsharded model. With a policy that one has more digits: what differs from FSDP2 is
    then right if it is as near to it as the policy's digits let it be, or nearer than FSDP2 is.
    """
    limit = _limit(program)
    if _has_plain(program):
        return difference(ours, plain, limit) is None
    for one, two, exact in zip(ours, fsdp2, plain, strict=True):
        if not one.keys() == two.keys() == exact.keys():
            return False
        for name in one:
            if _differs(one[name], two[name], limit) is None:
                continue
            mine, other, best = one[name], two[name], exact[name]
            if mine is None and best is None:
                continue
            if mine is None or best is None or mine.shape != best.shape:
                return False
            # FSDP2 may leave gradients in the narrow dtype
            if (other is None or mine.dtype != other.dtype) and mine.dtype != best.dtype:
                return False
            if _differs(mine, best.to(mine.dtype), limit) is None:
                continue
            if other is None or _error(mine, best) > _error(other, best):
                return False
    return True


def _left_by_fsdp2(program: Program, ours: Notes, fsdp2: Notes, plain: Notes) -> bool:
    """Whether FSDP2 keeps a gradient that its optimizer in backward should have taken.

    Reentrant checkpoints that run twice are two backwards: their hooks run twice, and an optimizer steps twice, as it
    does on a plain module. Here the unsharded model's steps once, behind the backward; FSDP2's, too, and what the
    second of the backwards brings stays on the parameter.
    """
    reentrant = any(layer.checkpoint == "reentrant" for layer in program.every_layer())
    if not (program.in_backward and reentrant and any(step.forwards > 1 for step in program.steps)):
        return False
    return any(
        theirs[name] is not None and mine.get(name) is None and exact.get(name) is None
        for mine, theirs, exact in zip(ours, fsdp2, plain, strict=True)
        for name in theirs
        if "gradient of" in name
    )


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.nan_to_num(real.double())


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    one, two = map(_numbers, (actual, expected))
    return float((one - two).abs().max())


def _relative(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """The largest error, relative to the largest element."""
    if actual is None or expected is None or actual.shape != expected.shape or not actual.numel():
        return 0.0
    return _error(actual, expected) / max(float(_numbers(expected).abs().max()), 1e-6)


def difference(actual: Notes, expected: Notes, limit: float) -> str | None:
    """The first difference of more than `limit` times the largest element (or 1e-6), in words; 0.0: of any bit."""
    for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for name in sorted(ours.keys() | theirs.keys(), key=_order):
            if name not in ours or name not in theirs:
                return f"rank {rank}: {name}: {'not there' if name not in ours else 'only ours'}"
            found = _differs(ours[name], theirs[name], limit)
            if found:
                return f"rank {rank}: {name}: {found}"
    return None


def _order(name: str) -> tuple[int, bool, str]:
    step = re.match(r"step (\d+)", name)
    return (int(step.group(1)) if step else 1000, "loss" not in name, name)


def _differs(ours: torch.Tensor | None, theirs: torch.Tensor | None, limit: float) -> str | None:
    if ours is None or theirs is None:
        return (
            None
            if ours is theirs
            else f"{'None' if ours is None else 'a tensor'}, not {'None' if theirs is None else 'a tensor'}"
        )
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype} {list(ours.shape)}, not {theirs.dtype} {list(theirs.shape)}"
    same_nan = torch.equal(torch.isnan(ours), torch.isnan(theirs))
    one, two = map(_numbers, (ours, theirs))
    if same_nan and torch.equal(one, two):
        return None
    error = _error(ours, theirs)
    allowed = limit * two.abs().max().item() + (1e-6 if limit else 0)
    return None if same_nan and error <= allowed else f"differs by {error:.3g} of {two.abs().max().item():.3g}"
