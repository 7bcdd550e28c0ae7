"""What is expected next, from what ran before."""

import hypothesis.strategies as st
from hypothesis import given

from compiled_fsdp.runtime import exec_order
from compiled_fsdp.runtime.exec_order import ExecOrder, GatherKey

KEYS = st.builds(GatherKey, st.booleans(), st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple))
RUNS = st.lists(KEYS, min_size=1, max_size=12)


def follow(runs: ExecOrder, keys: list[GatherKey]) -> list[GatherKey | None]:
    """Run `keys`; what was expected after each."""
    expected = []
    for key in keys:
        runs.add(key)
        expected.append(runs.next)
    runs.add(None)
    return expected


@given(RUNS)
def test_a_run_that_repeats_is_foreseen_to_its_end(keys):
    """Whatever repeats inside of it: a layer that is used twice, or the same set in forward and backward."""
    runs = ExecOrder()
    for _ in range(2):
        follow(runs, keys)
    assert follow(runs, keys) == [*keys[1:], None]


@given(st.lists(RUNS, min_size=2, max_size=4))
def test_a_run_of_another_kind_is_found_again(different):
    """Training and evaluation that take turns: the sets that only one of them has lead back to it."""
    marked = [[GatherKey(False, (100 + i,)), *keys] for i, keys in enumerate(different)]
    runs = ExecOrder()
    for keys in marked * 2:
        follow(runs, keys)
    for keys in reversed(marked):
        assert follow(runs, keys) == [*keys[1:], None]


@given(RUNS)
def test_nothing_is_expected_of_what_never_ran(keys):
    runs = ExecOrder()
    first = follow(runs, keys)
    seen: list[GatherKey] = []
    for key, expected in zip(keys, first, strict=True):
        assert expected is None or expected in [*seen, key]
        seen.append(key)


def test_a_job_that_runs_for_ever_remembers_so_much(monkeypatch):
    monkeypatch.setattr(exec_order, "LIMIT", 40)
    keys = [GatherKey(False, (i,)) for i in range(7)]
    runs = ExecOrder()
    for _ in range(30):
        expected = follow(runs, keys)
        assert len(runs.history) <= 40
    assert expected.count(None) <= 2  # at its end, and perhaps where the rest was forgotten


def test_runs_that_repeat_are_remembered_once():
    """Each call makes keys of its own; those of a thousand steps would stay."""
    runs = ExecOrder()
    for _ in range(50):
        follow(
            runs, [GatherKey(backward, (slot, slot + 1)) for backward in (False, True) for slot in range(1000, 1003)]
        )
    assert len({id(key) for key in runs.history if key is not None}) == 6
