"""What JSON has as a value of the type that it should be, or an error that says where it is not."""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_fsdp.base.plain_data import Unfit, from_json
from compiled_fsdp.buckets.agreed_plan import AgreedPlan
from compiled_fsdp.buckets.layout import TensorSize
from compiled_fsdp.compiler.cached_code import CachedCode, Decision
from compiled_fsdp.compiler.samples import Samples
from compiled_fsdp.passes.cost import PROFILES, Hardware
from compiled_fsdp.passes.plan import Bucket, GraphPlan
from compiled_fsdp.passes.plan.channels import CommChannel, ModelCollective
from compiled_fsdp.passes.plan.tasks import CollectiveTask, ComputeSegment, Tasks
from compiled_fsdp.ranks.question import Posted, Question

ROOT = Path(__file__).parents[2]


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True)
class Shape:
    name: str
    points: tuple[Point, ...]
    closed: bool = False
    colours: dict[str, float] = field(default_factory=dict)
    fill: Literal["plain", "striped"] | None = None
    pair: tuple[int, str] = (0, "")


WHOLE = '{"name": "a", "points": [[1, 2], [3, 4.5]], "colours": {"red": 1}, "fill": "plain", "pair": [1, "b"]}'


def test_values_have_the_types_of_their_annotations():
    shape = from_json(Shape, WHOLE)
    assert shape == Shape("a", (Point(1, 2.0), Point(3, 4.5)), False, {"red": 1.0}, "plain", (1, "b"))
    assert isinstance(shape.points[0].y, float)
    assert from_json(int, "8e10") == 80_000_000_000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": 1}, "it.name should be of type str, but is 1"),
        ({"points": [[1]]}, r"it.points\[0\] should be 2 values"),
        ({"points": [[1, "2"]]}, r"it.points\[0\]\[1\] should be a number"),
        ({"points": [[True, 2]]}, r"it.points\[0\]\[0\] should be a whole number"),
        ({"points": {}}, "it.points should be a list"),
        ({"closed": 0}, "it.closed should be of type bool"),
        ({"colours": {"red": None}}, r"it.colours\['red'\] should be a number"),
        ({"fill": "dotted"}, "it.fill should be .*striped"),
        ({"pair": [1, 2]}, r"it.pair\[1\] should be of type str"),
        ({"evil": "x"}, "it should be a Shape, which has no evil"),
    ],
)
def test_what_does_not_fit_is_named(change, says):
    with pytest.raises(Unfit, match=says):
        from_json(Shape, json.dumps(json.loads(WHOLE) | change))


@pytest.mark.parametrize("text", ["", WHOLE[:30], "[]", "null", "{}", "\x00", "[" * 100_000])
def test_what_is_half_written_or_something_else(text):
    with pytest.raises(Unfit):
        from_json(Shape, text)


TASKS = Tasks(
    "forward", (ComputeSegment(("start", "use 0"), 1.0, 8), ComputeSegment(("end",), 0.0, 0)),
    (CollectiveTask(0, 0, 0, "gather", TensorSize(100), 0, 1),), (), {"gather": CommChannel(1e-5, 0.0, 1e9, 2)},
    (ModelCollective("all_reduce", "gather", 8, 1, 0, 1, (0,)),),
)  # fmt: skip
KEPT: dict[str, tuple[Any, Any]] = {
    "plan": (GraphPlan("forward", (Bucket("gather", (0, 2), 0, 64),)), GraphPlan.from_json),
    "tasks": (TASKS, Tasks.from_json),
    "hardware": (PROFILES["h100"], Hardware.from_json),
    "code": (CachedCode((Decision("cut", ("a",), "[1]"),), ("{}",), AgreedPlan((), (), {})), CachedCode.from_json),
    "posted": (Posted(Question("cut", ("a", "b"), (), ("w",)), "[]"), Posted.from_json),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_is_kept_is_read_back(what):
    value, read = KEPT[what]
    assert read(value.to_json()) == value


@pytest.mark.parametrize("what", KEPT)
@given(st.data())
def test_whatever_is_damaged_is_unfit(what, data):
    """Another value somewhere, something missing, something more, a text cut short: no other error, and no other type
    gets through."""
    value, read = KEPT[what]
    text = value.to_json()
    if data.draw(st.booleans()):
        damaged = text[: data.draw(st.integers(0, len(text) - 1))]
    else:
        whole = json.loads(text)
        place, key = whole, data.draw(st.sampled_from(sorted(whole)))
        while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
            place = place[key]
            key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if data.draw(st.booleans()) and isinstance(place, dict):
            del place[key]
        else:
            place[key] = data.draw(st.sampled_from([None, True, "x", 7, 0.5, [], {}, [[]], {"a": None}]))
        damaged = json.dumps(whole)
    try:
        found = read(damaged)
    except Unfit:
        return
    assert isinstance(found, type(value))
    assert read(found.to_json()) == found


def test_samples_are_typed():
    text = json.dumps([{"kind": "gather", "ranks": 2, "nodes": 1, "sizes": [1, 2], "seconds": [0.1, 0.2]}])
    assert from_json(tuple[Samples, ...], text) == (Samples("gather", 2, 1, (1, 2), (0.1, 0.2)),)


UNPICKLES = {
    "pickle", "pickle.load", "pickle.loads", "torch.load", "dist.all_gather_object", "dist.gather_object",
    "dist.broadcast_object_list", "dist.scatter_object_list", "dist.recv_object_list",
}  # fmt: skip


def names_used(path: Path) -> Iterator[str]:
    """What a file imports, and attributes such as `torch.load`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_nothing_of_ours_unpickles():
    """Neither from files nor from other ranks; what DCP reads is torch's to check."""
    files = [path for folder in ("compiled_fsdp", "passes") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): UNPICKLES & set(names_used(path)) for path in files}
    assert not {path: names for path, names in found.items() if names}
