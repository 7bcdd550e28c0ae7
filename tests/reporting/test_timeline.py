"""The simulated step in time: as lanes, as a trace, as a page."""

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.passes.plan.simulate import simulate
from compiled_fsdp.tools.timeline import COMPUTE, Timeline, of_plan, timeline_of
from compiled_fsdp.tools.timeline_files import heading, write
from tests.harness import compiled, loss_of, shard, variants
from tests.harness.fake import fake_group
from tests.harness.models import broken, small
from tests.passes.plan.cases import tasks_and_schedules


def planned(build=small, **options):
    """What ``explain`` says of a model after a step among two ranks of which one is there."""
    with fake_group(2):
        model = shard(build(), fully_shard)
        loss_of(compiled(model, **options), 0, 0).backward()
        return explain(model)


def lanes_of(tasks):
    by_lane = {}
    for task in tasks:
        by_lane.setdefault(task.stream, []).append(task)
    return by_lane


def check(graph, tasks, simulation):
    """Lanes hold one thing at a time; all compute and all collectives are there; the end is the simulation's."""
    for lane in lanes_of(task for task in graph.tasks if task.duration_s).values():
        for one, following in itertools.pairwise(sorted(lane, key=lambda task: task.start_s)):
            assert one.end_s <= following.start_s + 1e-9, (one, following)
    computed = [task for task in graph.tasks if task.kind == COMPUTE]
    segments = [task for task in computed if not task.name.startswith(("pack", "unpack"))]
    assert len(segments) == tasks.end + 1
    if not tasks.has_contention:
        assert sum(t.duration_s for t in segments) == pytest.approx(sum(s.seconds for s in tasks.segments))
    exposed = sum(task.exposed_s for task in graph.tasks)
    launches = tasks.launch_seconds * len(tasks.model_collectives)
    last = max(max((task.end_s for task in computed), default=0.0), simulation.reached[-1])
    spent = sum(t.duration_s for t in computed) + exposed + launches
    assert spent == pytest.approx(last) if not (tasks.has_contention and launches) else spent <= last + 1e-9
    assert graph.duration_s == simulation.seconds >= last - 1e-9
    assert max(held for _, held in graph.memory) == simulation.peak


@given(tasks_and_schedules())
@settings(max_examples=200, deadline=None)
def test_lanes_are_the_simulation(case):
    tasks, schedule = case
    simulation = simulate(tasks, schedule)
    check(of_plan(tasks, simulation, "graph"), tasks, simulation)


@pytest.mark.parametrize("build", [small, broken])
def test_of_a_model(build):
    explanation = planned(build)
    timeline = explanation.timeline()
    assert Timeline.from_json(timeline.to_json()) == timeline
    for one, following in itertools.pairwise(timeline.graphs):
        assert following.start_s == pytest.approx(one.start_s + one.duration_s)
    by_phase = {graph.phase: graph for graph in explanation.graphs}
    for graph in timeline.graphs:
        assert all(graph.start_s - 1e-9 <= task.start_s for task in graph.tasks)
        for task in graph.tasks:
            if task.kind == "gather":
                uses = [graph.tasks[place] for place in (task.first_use, task.last_use)]
                assert all(use.kind == COMPUTE for use in uses)
                assert task.end_s <= uses[0].start_s + 1e-9 <= uses[1].start_s + 2e-9
            if task.kind == "reduce" and task.producer is not None:
                assert graph.tasks[task.producer].end_s <= task.launch_s + 1e-9
    names = {member.name for graph in timeline.graphs for task in graph.tasks for member in task.members}
    assert names == {read.name for graph in by_phase.values() for read in graph.reads} if build is small else names


def test_graphs_between_graph_breaks_have_numbers():
    """The backward of a graph has its number."""
    timeline = timeline_of(2 * planned(broken).graphs)
    assert [graph.name for graph in timeline.graphs] == ["forward 0", "forward 1", "backward 1", "backward 0"]


def test_a_trace(tmp_path):
    explanation = planned()
    file = tmp_path / "step.json"
    timeline = explanation.timeline(file)
    events = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(len(graph.tasks) for graph in timeline.graphs)
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        task.stream for graph in timeline.graphs for task in graph.tasks
    }
    assert max(event["ts"] + event["dur"] for event in spans) <= 1e6 * timeline.seconds + 1e-3
    peak = max(event["args"]["bytes"] for event in events if event["ph"] == "C")
    assert peak == max(graph.simulation.peak for graph in explanation.graphs)


def test_a_page(tmp_path):
    file = tmp_path / "step.html"
    timeline = planned().timeline(file)
    text = file.read_text()
    assert "Plotly.newPlot" in text
    assert "cdn." not in text.partition("Plotly.newPlot")[2]
    for graph in timeline.graphs:
        for task in graph.tasks:
            assert task.members[0].name in text if task.members else True
            assert (
                task.exposed_s == 0
                or f"<td>{1e3 * task.exposed_s:,.3f}</td>" in text.partition("compute waits for<")[2]
            )
    assert any(task.exposed_s for graph in timeline.graphs for task in graph.tasks)


def measured_beside(timeline):
    """The same, as if it had been measured: every task takes twice as long, in a lane of another name."""
    graphs = []
    for graph in timeline.graphs:
        tasks = [
            replace(t, stream="ranks 0,1" if t.kind != COMPUTE else COMPUTE, start_s=2 * t.start_s,
                    duration_s=2 * t.duration_s, reason="")
            for t in graph.tasks
        ]  # fmt: skip
        graphs.append(replace(graph, measured=tuple(tasks)))
    return Timeline(tuple(graphs), timeline.hardware)


def test_headings():
    timeline = planned().timeline()
    assert heading(timeline) == f"forward, backward: {1e3 * timeline.seconds:,.1f} ms on {timeline.hardware}"
    assert timeline.hardware
    both = measured_beside(timeline)
    end = max(task.end_s for graph in both.graphs for task in graph.measured)
    planned_for = f"{1e3 * both.seconds:,.1f} ms on {both.hardware}"
    assert heading(both).endswith(f": planned {planned_for}, measured {1e3 * end:,.1f} ms")
    assert heading(Timeline(5 * timeline.graphs)).startswith("10 graphs: ")


@pytest.mark.parametrize("measured", variants([False, True], True), ids=["planned", "measured"])
def test_a_browser_draws_it(tmp_path, measured):
    """Once its code has run, the page has a bar for each task, and the curve of memory."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    timeline, file = planned().timeline(), tmp_path / "step.html"
    if measured:
        timeline = measured_beside(timeline)
    write(timeline, file)
    flags = "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", f"--user-data-dir={tmp_path}"
    done = subprocess.run(
        [browser, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    drawn = done.stdout.partition('class="barlayer')[2]
    shown = [task for graph in timeline.graphs for task in (*graph.tasks, *graph.measured)]
    assert drawn.count('class="point"') == len(shown)
    assert "MB on a rank" in drawn or "kB on a rank" in drawn
    assert 'class="scatterlayer' in drawn
    assert ("measured: ranks 0,1" in drawn) == measured


def test_what_cannot_be_written(tmp_path, monkeypatch):
    explanation = planned()
    with pytest.raises(ValueError, match=r"\.html .*\.json"):
        explanation.timeline(tmp_path / "step.png")
    with fake_group(2), pytest.raises(ValueError, match="call the compiled model once"):
        explain(shard(small(), fully_shard)).timeline()
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install plotly"):
        explanation.timeline(tmp_path / "step.html")
