"""What two ways of running a program have in common: equal bits, or values within the rounding of a dtype."""

from __future__ import annotations

import re

import torch

from tests.fuzz import execute
from tests.fuzz.program import Program

Notes = list[execute.Notes]
"""What each rank has noted."""

ROUNDING = 2e-5
"""Of float32, relative to the largest element, after a few steps."""


def is_exact(program: Program) -> bool:
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
        # a unit's input is returned, too: FSDP2 adds its gradients in another order (see is_nearer), and with a policy
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


def limit_of(program: Program) -> float:
    """Relative to the largest element. Narrow dtypes round, and normalized weights amplify."""
    low = program.policy or any(
        layer.dtype == "bfloat16" or layer.kind == "autocast" for layer in program.every_layer()
    )
    return 0.1 if low else ROUNDING


def has_plain(program: Program) -> bool:
    """Whether the unsharded model computes the same: it has no policy."""
    return not program.policy


def is_nearer(program: Program, ours: Notes, fsdp2: Notes, plain: Notes) -> bool:
    """Whether ours is equal to the unsharded model, bit for bit or but for rounding in float32, and FSDP2 is not.

    FSDP2's hooks are autograd nodes around each unit: where other code reads a unit's input, too, it adds their
    gradients in another order.
    """
    if not has_plain(program):
        # Its digits are more than a policy's. For example, FSDP2 divides twice over replicas without shards.
        differ = [
            (mine, two[name], exact[name])
            for one, two, exact in zip(ours, fsdp2, plain, strict=True)
            for name, mine in one.items()
            if _differs(mine, two[name], 0.0) is not None
        ]
        return all(_is_much_nearer(*each) for each in differ)
    return any(
        difference(ours, plain, limit) is None and difference(fsdp2, plain, limit) is not None
        for limit in (0.0, ROUNDING)
    )


def _is_much_nearer(mine: torch.Tensor | None, other: torch.Tensor | None, exact: torch.Tensor | None) -> bool:
    if mine is None or other is None or exact is None or mine.shape != exact.shape:
        return False
    return 10 * _error(mine, exact) <= _error(other, exact)


def is_right(program: Program, ours: Notes, fsdp2: Notes, plain: Notes) -> bool:
    """Whether ours is equal to the unsharded model. With a policy that one has more digits: what differs from FSDP2 is
    then right if it is as near to it as the policy's digits let it be, or nearer than FSDP2 is.
    """
    limit = limit_of(program)
    if has_plain(program):
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


def left_by_fsdp2(program: Program, ours: Notes, fsdp2: Notes, plain: Notes) -> bool:
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


def relative(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
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
