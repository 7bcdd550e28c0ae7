"""What leads to a graph break in a call is guarded on, so that other steps take other code; what counts up is not."""

import enum
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn

from compiled_fsdp import fully_shard
from compiled_fsdp.reporting.compile_log import COMPILE_LOG
from tests.harness import compiled, variants
from tests.harness.fake import fake_group

WHAT: dict[str, Any] = {"says": False}


class Mode(enum.Enum):
    QUIET = 0
    LOUD = 1


class Layers(nn.Module):
    """Two layers, and perhaps a break between them."""

    what: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        x = self.first(x)
        if self.says(*arguments):
            torch._dynamo.graph_break()
        return self.second(x)

    def says(self, *arguments: Any) -> bool:
        return bool(self.what)


class InEnumeration(Layers):
    def says(self) -> bool:
        return self.what is Mode.LOUD


class InGlobal(Layers):
    def says(self) -> bool:
        return WHAT["says"]


class InArgument(Layers):
    def says(self, what: bool) -> bool:
        return what


class NotNone(Layers):
    def says(self) -> bool:
        return self.what is not None


class Masked(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    def says(self) -> bool:
        return self.mask is not None


class Member(Layers):
    def says(self) -> bool:
        return "says" in self.what


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return self.after(self.inner(self.before(x), *arguments))


@pytest.fixture
def group() -> Iterator[None]:
    with fake_group(2):
        yield


def sharded(inner: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A model with layers around ``inner``, and the same compiled."""
    model = Around(inner)
    fully_shard(model.inner)
    fully_shard(model)
    return model, compiled(model)


def reads_compiled(run: nn.Module, rows: int, *arguments: Any) -> list[int]:
    """How many parameters each forward graph reads that a step compiles."""
    before = len(COMPILE_LOG.graphs)
    run(torch.ones(rows, 4), *arguments).sum().backward()
    return [len(graph.reads) for graph in list(COMPILE_LOG.graphs)[before:] if graph.phase == "forward"]


KINDS: dict[str, tuple[type[Layers], Any, Any]] = {
    "list": (Layers, [], [1]),
    "enumeration": (InEnumeration, Mode.QUIET, Mode.LOUD),
    "function": (NotNone, None, print),
    "buffer": (Masked, None, torch.ones(1)),
    "dictionary": (Member, {}, {"says": 1}),
    "class": (Layers, False, True),
    "global": (InGlobal, False, True),
    "argument": (InArgument, False, True),
}


@pytest.mark.parametrize("kind", variants(KINDS, "global"))
def test_what_a_break_may_come_of(group, kind):
    """Code with the break was compiled for any number of rows; a step without the break is one graph all the same."""
    cls, quiet, loud = KINDS[kind]
    model, run = sharded(cls())

    def step(what: Any, rows: int) -> list[int]:
        if kind == "global":
            WHAT["says"] = what
        elif kind == "class":
            Layers.what = what
        elif kind != "argument":
            setattr(model.inner, "mask" if kind == "buffer" else "what", what)
        return reads_compiled(run, rows, *([what] if kind == "argument" else []))

    try:
        assert step(quiet, 2) == [8]
        assert len(step(loud, 4)) == 4
        assert step(loud, 6) == []
        assert step(quiet, 5) == [8]
        assert step(loud, 5) == step(quiet, 5) == []
    finally:
        Layers.what = None


class Counts(Layers):
    """Counts its calls, and always breaks; Dynamo cannot go on behind the break, and compiles nothing of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.lines = 0, ["begin"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.first(x)
            self.calls += 1
            self.lines.append(f"call {self.calls}")
            torch._dynamo.graph_break()
            return self.second(x)
        finally:
            self.called = True


def test_a_count_before_a_break_is_no_compile_in_each_step(group):
    """Which was an error at Dynamo's last limit, after 256 steps."""
    _, run = sharded(Counts())
    counts = [len(reads_compiled(run, 2)) for _ in range(8)]
    assert counts[0] > 0
    assert counts[5:] == [0, 0, 0]
