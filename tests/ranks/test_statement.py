"""What ranks do that say different things at one position: one of them leads, or all get an error that names it."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_fsdp.buckets.agreed_plan import AgreedPlan
from compiled_fsdp.ranks.statement import Outcome, Statement, outcome_of


def says(names: str, **changes: object) -> Statement:
    """A rank that compiles code which reads parameters with one letter each."""
    read = tuple(names)
    return replace(Statement("compiles", "options", "training", read, ("float32[4]",) * len(read), read), **changes)


def reads(names: str) -> Statement:
    return says(names, what="reads", options="")


def ran(names: str) -> Statement:
    return says(names, what="ran", plan=AgreedPlan(("options", "training"), (), {}))


def runs(names: str, kind: str = "training", *reads: str) -> Statement:
    """A rank that is about to run code which was compiled for equal layers."""
    return says(names, what="runs", plan=AgreedPlan(("options", kind, *reads), (), {}))


@pytest.mark.parametrize(
    ("statements", "leader"),
    [
        ([says("ab"), says("abcd")], 1),  # a graph break on rank 0
        ([says("abcd"), says("ab")], 0),
        ([says("a"), says("abc"), says("ab")], 1),
        ([reads("ab"), says("abcd")], 1),  # Dynamo gave up on rank 0
        ([says("ab"), reads("ab")], 0),
        ([says("a"), reads("ab")], None),  # read block by block
        ([says("abcd"), ran("ab")], 1),  # rank 1 runs code with a break
        ([says("a"), ran("ab"), ran("ab")], 1),
        ([says("a"), runs("ab")], 1),
        ([ran("ab"), runs("ab")], 0),  # rank 0 has passed this position
        ([runs("ab"), runs("ab", "training, in a checkpoint")], 0),  # other code with the same collectives
        ([says("abc", rest=("c",)), says("c")], 1),  # rank 0 has "a" and "b" already
        ([says("ab"), says("ba"), says("ba")], 1),  # what most of them say
        ([says("ab"), says("ba")], 0),
        ([says("aab", lines=("float32[4]", "frozen", "float32[4]")), says("a")], 0),  # "a" once more without a gradient
    ],
)
def test_who_leads(statements, leader):
    outcome = outcome_of(statements)
    assert outcome.problem == ""
    assert outcome.leader == leader
    assert outcome.statement in statements


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        ([says("ab"), says("ac")], "Rank 1 .*: read 1: c .*; rank 0 has: read 1: b "),
        ([says("ab"), says("cd")], "Rank 1 .*: read 0: c .*; rank 0 has: read 0: a "),
        ([says("ab"), says("ab", options="other")], "Rank 1 .*: other; rank 0 has: options"),
        ([says("ab"), says("ab", kind="inference")], "Rank 1 .*: inference, .*; rank 0 has: training"),
        ([says("ab"), says("ab", lines=("float32[4]", "int8[4]"))], r"b int8\[4\]; rank 0 has: b float32\[4\]"),
        ([says("ab", model=("a: x",)), says("ab", model=("a: y",))], "a: y; rank 0 has: a: x"),
        ([says("ab"), ran("cd")], "Rank 0 .*; rank 1 has: "),
        ([ran("ab"), ran("cd"), says("ab")], "Rank 1 .*; rank 0 has: "),
        ([ran("ab"), runs("ab", "training", "resharded")], "Ranks 0 and 1 .* other collectives .* from 'a' on"),
        ([runs("ab"), runs("cd")], "Rank 1 .*; rank 0 has: "),
        (
            [says("a", lines=(f"int8[4], {mode}, avg",), kind="backward") for mode in ("resharded", "kept")],
            r"a int8\[4\], kept, avg; .* in a checkpoint on all ranks or on none",
        ),
        ([says("ab", lines=("float32[4]", "int8[4]")), ran("ab")], r"Rank 1 .*float32.*; rank 0 has: b int8"),
        (
            [says("a"), says("ab", lines=("float32[4]", "int8[4]")), ran("ab")],
            r"Rank 1 .*int8.*; rank 2 has: b float32",
        ),
    ],
)
def test_what_cannot_be_done_together(statements, problem):
    assert re.search(problem, outcome_of(statements).problem), outcome_of(statements).problem


@st.composite
def parts_of_one_program(draw):
    """Ranks that read parts of one sequence of parameters, from its beginning."""
    names = "abcdef"[: draw(st.integers(1, 6))]
    lengths = draw(st.lists(st.integers(1, len(names)), min_size=2, max_size=5))
    kinds = draw(st.lists(st.sampled_from((says, reads)), min_size=len(lengths), max_size=len(lengths)))
    return [kind(names[:length]) for kind, length in zip(kinds, lengths, strict=True)]


@settings(deadline=None)
@given(parts_of_one_program())
def test_ranks_that_read_the_same_always_find_a_leader(statements):
    outcome = outcome_of(statements)
    assert not outcome.problem
    assert outcome.statement is not None
    assert all(set(each.rest) <= set(outcome.statement.names) for each in statements)
    assert (outcome.leader is None) == (outcome.statement.what == "reads")


@settings(deadline=None)
@given(parts_of_one_program())
def test_statements_are_plain_data(statements):
    for statement in (*statements, ran("ab")):
        assert Statement.from_json(statement.to_json()) == statement
        assert len(statement.digest()) == 64
    assert outcome_of(statements) == outcome_of([Statement.from_json(each.to_json()) for each in statements])
    assert isinstance(outcome_of(statements), Outcome)
