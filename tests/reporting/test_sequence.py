"""The time of graphs that run one after another because of graph breaks."""

import pytest

from compiled_fsdp.passes.plan.simulate import simulate
from compiled_fsdp.passes.plan.tasks import Tasks
from compiled_fsdp.tools.sequence import simulate_in_sequence
from tests.passes.plan.cases import gather, reduction, tasks_of


def forward(compute: float, size: int) -> tuple:
    """A graph with one gather, which crosses its edge."""
    tasks = tasks_of([compute], [(size, 0, 0)])
    return tasks, simulate(tasks, (gather(0, 0, 0),)), [0]


def backward(compute: float, size: int) -> tuple:
    """A graph with one reduction, which crosses its edge."""
    tasks = tasks_of([compute], (), [(size, 1)])
    return tasks, simulate(tasks, (reduction(0, 1, 1),)), [0]


@pytest.mark.parametrize("graph", [forward(5, 2), backward(5, 2)])
def test_a_graph_alone(graph):
    assert simulate_in_sequence([graph]).seconds == graph[1].seconds


@pytest.mark.parametrize(
    ("compute", "size", "seconds"),
    [(5, 2, 2 + 4 * 5), (4, 10, 4 * 10 + 4)],  # compute hides all gathers but the first; compute waits for the link
)
def test_gathers_are_in_flight_beside_the_graph_before(compute, size, seconds):
    found = simulate_in_sequence([forward(compute, size)] * 4)
    assert found.seconds == seconds
    assert found.exposed == seconds - 4 * compute


@pytest.mark.parametrize(("compute", "size", "seconds"), [(4, 3, 4 * 4 + 3), (4, 10, 4 + 4 * 10)])
def test_reductions_are_in_flight_beside_the_graph_behind(compute, size, seconds):
    assert simulate_in_sequence([backward(compute, size)] * 4).seconds == seconds


def test_a_training_step():
    """Two layers. The link is idle while the last forward and the first backward compute."""
    found = simulate_in_sequence([forward(5, 2)] * 2 + [backward(5, 2)] * 2)
    assert found.seconds == 2 + 4 * 5 + 2
    assert isinstance(found.timings[0].start, float)
    assert [timing.start for timing in found.timings] == [0.0, 2.0, 17.0, 22.0]


def test_launches_of_several_collectives_keep_their_places():
    """Only what crosses an edge moves: each graph's second gather stays in it."""
    tasks: Tasks = tasks_of([3, 3], [(1, 0, 0), (2, 1, 1)])
    own = simulate(tasks, (gather(0, 0, 0), gather(1, 0, 1)))
    found = simulate_in_sequence([(tasks, own, [0])] * 2)
    assert [timing.launch.at for timing in found.timings] == [0, 0, 0, 2]
    assert [timing.launch.wait for timing in found.timings] == [0, 1, 2, 3]
    assert found.seconds == 1 + 4 * 3
