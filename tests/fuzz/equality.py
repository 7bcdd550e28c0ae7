"""Comparison of two ways of running a program: equal bits, or values that differ by no more than a dtype's rounding."""

from __future__ import annotations

import re

import torch

from tests.fuzz import execute
from tests.fuzz.program import Program

Notes = list[execute.Notes]
"""The values that each rank has noted."""

ROUNDING = 2e-5
"""float32's rounding after a few steps, relative to the largest element."""


def is_exact(program: Program) -> bool:
    """Whether compiled_fsdp and FSDP2 do the same arithmetic. docs/differences.md says when they do not."""
    stale = program.writes and any("forward_prefetch" in call for call in program.sharding)
    evaluates = any(step.kind in ("evaluate", "inference") for step in program.steps)
    ranks_added = program.world if program.mesh != "TP" else 2
    order = (
        program.mode in ("inductor", "dynamic")
        or program.compiles_update  # bias corrections are float32
        or any(step.forwards > 1 for step in program.steps)  # each forward's gradients are reduced, then added
        or any(step.sync == "node" for step in program.steps)  # FSDP2 reduces over all ranks in each microbatch
        or len(set(program.calls)) < len(program.calls)
        or any(
            layer.kind in ("twice", "tied", "cell", "disabled", "softmax", "recomputed")
            for layer in program.every_layer()
        )
        or (program.tokens and program.head == "tied")
        # gradients that wait for the replicas are divided before or after the last one is added; a third is rounded
        or (
            any("divide_factor" in call for call in program.sharding) and any(s.sync == "shards" for s in program.steps)
        )
        # one shard: compiled_fsdp adds up full gradients, FSDP2 adds up gradients that it has rounded for the wire
        or (
            program.mesh in ("HSDP all", "replicate")
            and program.policy
            and any(step.sync == "shards" for step in program.steps)
        )
        or stale  # FSDP2 uses a prefetched gather even if the shards were written to in between
        # the model also returns a unit's input: FSDP2 adds its gradients in another order (see is_nearer), and with a
        # policy there is no unsharded model with the same digits to compare with
        or (program.policy and program.output == "middle")
        # one rank's other code also reads a unit's input: the same, but the unsharded model is equally near to both
        or program.other in ("scaled", "first row")
        # a reentrant checkpoint's backward ends before the backward around it, and reduces the pending gradients
        or (
            program.mode == "compiled autograd"
            and any(step.microbatches > 1 for step in program.steps)
            and any(layer.checkpoint == "reentrant" for layer in program.every_layer())
        )
        # without gradients, the last bit of a recurrent layer's output is not always the plain module's
        or (evaluates and any(layer.kind in ("gru", "lstm") for layer in program.every_layer()))
        # the layer reads its parameters twice: with torch's backends each read's gradient is reduced by itself
        or (program.mode == "torch's aot_eager" and any(layer.kind == "listed" for layer in program.every_layer()))
    )
    return ranks_added == 2 and not order


def limit_of(program: Program) -> float:
    """Return the allowed difference, relative to the largest element.

    It is larger with narrow dtypes, because they round, and normalized weights amplify the rounding.
    """
    low = program.policy or any(
        layer.dtype == "bfloat16" or layer.kind == "autocast" for layer in program.every_layer()
    )
    return 0.1 if low else ROUNDING


def has_plain(program: Program) -> bool:
    """Whether the unsharded model computes the same: it has no policy, and no gradients of unused parameters."""
    return not program.policy and not any("reduce_scatter_unused_params" in call for call in program.sharding)


def is_nearer(program: Program, ours: Notes, fsdp2: Notes, plain: Notes) -> bool:
    """Whether compiled_fsdp is equal to the unsharded model, bit for bit or up to float32 rounding, and FSDP2 is not.

    FSDP2's hooks are autograd nodes around each unit. If other code also reads a unit's input, FSDP2 adds their
    gradients in another order. With a policy: whether compiled_fsdp is much nearer than FSDP2 wherever they differ.
    """
    if not has_plain(program):
        # The unsharded model has more digits than the policy. For example, FSDP2 divides twice over replicas without
        # shards, and is then farther from it.
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
    """Whether compiled_fsdp is equal to the unsharded model.

    With a policy the unsharded model has more digits. Then a value that differs from FSDP2's is right if it is as near
    to the unsharded model's as the policy's digits allow, or nearer than FSDP2's.
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


def steps_twice(program: Program, ours: Notes, fsdp2: Notes, plain: Notes) -> bool:
    """Whether an optimizer in backward steps twice in a reentrant checkpoint, where FSDP2's or the plain one does not.

    A reentrant checkpoint that runs twice has two backwards. Its hooks run twice, and an optimizer in them steps twice,
    as on a plain module. In these programs the unsharded model's optimizer steps once, after the backward. FSDP2's
    optimizer steps once, and the second backward's gradient stays on the parameter; or it steps more often than
    compiled_fsdp's. The checkpoint's second backward computes with updated parameters. So after the first step
    compiled_fsdp is near the unsharded model, but not equal to it.
    """
    reentrant = any(layer.checkpoint == "reentrant" for layer in program.every_layer())
    if not (program.in_backward and reentrant and any(step.forwards > 1 for step in program.steps)):
        return False
    if any(
        theirs[name] > mine[name] for mine, theirs in zip(ours, fsdp2, strict=True) for name in mine
        if "steps of" in name
    ):  # fmt: skip
        return difference(_of_first_step(ours), _of_first_step(plain), max(limit_of(program), 0.01)) is None
    return any(
        theirs[name] is not None and mine.get(name) is None and exact.get(name) is None
        for mine, theirs, exact in zip(ours, fsdp2, plain, strict=True)
        for name in theirs
        if "gradient of" in name
    )


def _of_first_step(notes: Notes) -> Notes:
    return [{name: value for name, value in rank.items() if name.startswith("step 0:")} for rank in notes]


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.nan_to_num(real.double())


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    one, two = map(_numbers, (actual, expected))
    return float((one - two).abs().max())


def relative(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Return the largest error, relative to the largest element."""
    if actual is None or expected is None or actual.shape != expected.shape or not actual.numel():
        return 0.0
    return _error(actual, expected) / max(float(_numbers(expected).abs().max()), 1e-6)


def difference(actual: Notes, expected: Notes, limit: float) -> str | None:
    """Return the first difference of more than `limit` times the largest element plus 1e-6, in words.

    With limit 0.0 any difference counts.
    """
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
