"""A compile does not map memory again and again, however deep in a stack of calls it begins."""

import resource
from collections.abc import Callable

import pytest

from compiled_fsdp.base.frames import frames_in_one_piece
from compiled_fsdp.compiler.compilation import Compilation
from compiled_fsdp.compiler.preview import _Preview

CALLS = 2_000
DEPTHS = 200  # more than a piece of 16 KB has room for


def _small(value: int) -> int:
    return value


def _page_faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(CALLS):
        _small(number)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _at_depth(depth: int, function: Callable[[], int]) -> int:
    return _at_depth(depth - 1, function) if depth else function()


def test_a_loop_at_any_depth_maps_no_memory() -> None:
    """On Python 3.11 and 3.12 a loop at the end of a piece has a page fault in each call without the decorator."""
    inside = frames_in_one_piece(_at_depth)
    assert max(inside(depth, _page_faults) for depth in range(DEPTHS)) < CALLS // 10


def test_arguments_results_and_errors_pass_through() -> None:
    @frames_in_one_piece
    def divide(left: int, right: int = 2, *, less: int = 0) -> float:
        """Divide."""
        return left / right - less

    assert divide(6) == 3
    assert divide(6, 3, less=1) == 1
    assert (divide.__name__, divide.__doc__) == ("divide", "Divide.")
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)


@pytest.mark.parametrize("compilation", [Compilation, _Preview])
def test_compiles_and_plans_have_their_frames_in_one_piece(compilation: type[Compilation]) -> None:
    large = frames_in_one_piece(_small).__code__.co_stacksize
    assert compilation.compile.__code__.co_stacksize == large
