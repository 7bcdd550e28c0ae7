"""What ``torch.compile(model, backend="compiled_fsdp", options={...})`` takes; every bad value is named."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiled_fsdp.passes.pipeline import pass_names


@dataclass(frozen=True)
class Options:
    """Options of the backend.

    Attributes:
        bucket: "module", one bucket per ``fully_shard`` unit or repeated block; "none", one per parameter.
        overlap: launch collectives ahead of the compute that hides them; False launches each where it is waited for.
        prefetch: with ``bucket="module"``, launch the next gather "before" a unit's compute or "after" it (less memory).
        codegen: "inductor", or "aot_eager", which runs the rewritten graphs as they are: quick to compile, for tests.
        verify: "plan" checks that all ranks compile the same regions; "full" also checks the graph after every pass;
            "off" checks nothing.
        disable_passes: names from ``compiled_fsdp.passes.pipeline``.
        inductor: Inductor's own options, e.g. ``{"max_autotune": True}``.
        collectives_at_world_size_1: for debugging and timing: keep collectives in a group of one rank.
        optimizer_bytes: what the memory budget counts for optimizer state, bytes per parameter element.
        memory_budget, reshard_after_forward, hardware: the planner's; only their defaults are real yet.
    """

    bucket: str = "module"
    overlap: bool = True
    prefetch: str = "before"
    codegen: str = "inductor"
    verify: str = "plan"
    disable_passes: tuple[str, ...] = ()
    inductor: Mapping[str, Any] = field(default_factory=dict)
    collectives_at_world_size_1: bool = False
    optimizer_bytes: float = 8
    memory_budget: Any = None
    reshard_after_forward: Any = "as sharded"
    hardware: Any = "auto"

    def __post_init__(self) -> None:
        _check_choice(
            "bucket", self.bucket, ("module", "none"), not_yet=self.bucket == "auto" or _is_number(self.bucket)
        )
        _check_choice("prefetch", self.prefetch, ("before", "after"))
        _check_choice("codegen", self.codegen, ("inductor", "aot_eager"))
        _check_choice("verify", self.verify, ("plan", "full", "off"))
        _check_choice(
            "reshard_after_forward",
            self.reshard_after_forward,
            ("as sharded",),
            not_yet=self.reshard_after_forward == "auto",
        )
        _check_choice("hardware", self.hardware, ("auto",), not_yet=True)
        _check_choice("memory_budget", self.memory_budget, (None,), not_yet=_is_number(self.memory_budget))
        for name in ("overlap", "collectives_at_world_size_1"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"compiled_fsdp: option {name!r} must be True or False, but got {getattr(self, name)!r}."
                )
        if not (_is_number(self.optimizer_bytes) and self.optimizer_bytes >= 0):
            raise ValueError(
                f"compiled_fsdp: option 'optimizer_bytes' must be a number of bytes >= 0, but got {self.optimizer_bytes!r}."
            )
        if isinstance(self.disable_passes, str) or not isinstance(self.disable_passes, Sequence):
            raise ValueError(
                f"compiled_fsdp: option 'disable_passes' must be a sequence of names, but got {self.disable_passes!r}."
            )
        object.__setattr__(self, "disable_passes", tuple(self.disable_passes))
        for name in self.disable_passes:
            _check_choice("disable_passes", name, pass_names())
        if not isinstance(self.inductor, Mapping):
            raise ValueError(
                f"compiled_fsdp: option 'inductor' must be a dict of Inductor's options, but got {self.inductor!r}."
            )

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Options from what ``torch.compile`` was given.

        Raises:
            ValueError: an unknown option or a bad value, with what is taken instead.
            NotImplementedError: a value that is not real yet.
        """
        options = dict(options or {})
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"compiled_fsdp: unknown option {name!r}.{hint} Known options: {', '.join(known)}; Inductor's own go into 'inductor'."
                )
        return cls(**options)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_choice(name: str, value: Any, choices: Sequence[Any], *, not_yet: bool = False) -> None:
    if value in choices:
        return
    taken = ", ".join(map(repr, choices))
    if not_yet:
        raise NotImplementedError(f"compiled_fsdp: option {name!r}: {value!r} is not supported yet; use {taken}.")
    raise ValueError(f"compiled_fsdp: option {name!r} takes {taken}, but got {value!r}.")
