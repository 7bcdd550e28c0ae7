"""What ``print(explain(model))`` shows: texts, tables, HTML and JSON."""

import html.parser
import json
import re
import sys
from collections import OrderedDict
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.passes.plan.simulate import memory_curve, memory_parts
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.tools.words import WIDTH, wrapped
from tests.harness import compiled
from tests.harness.fake import fake_group
from tests.reporting.planned import plan, ranks, sharded


@pytest.fixture(scope="module")
def explained():
    """The model by unit: there is something to say."""
    with ranks() as mesh:
        found = plan(sharded(mesh), bucket="module")
        assert found.advice  # planned while the group is there, as for a user
        return found


def test_verdict_and_advice(explained):
    assert_expected_inline(
        str(explained),
        """\
4 units with 8 sharded parameters, 2 planned graphs, no graph breaks
times are planned for h100 (the option 'hardware': built-in profile, not measured)
[0] forward 2.8 ms = compute 1.2 + exposed 0.9 + overhead 0.6; bound 1.9 ms (+49%)
    exposed: 0.9 of 1.9 ms on the network; gather of table.weight and 1 more, needed at the start
    peak 648.4 MB: shards+grads+optimizer 43.5, unsharded 262.1, activations 8.4, buckets 334.4
[1] backward 4.5 ms = compute 2.3 + exposed 1.2 + overhead 1.1; bound 3.2 ms (+43%)
    exposed: 1.2 of 3.5 ms on the network; reduction of table.weight and 1 more, complete at the end
    peak 739.7 MB: shards+grads+optimizer 43.5, unsharded 131.1, activations 497.0, buckets 68.2
a training step, [0] + [1]: 7.3 ms, 2.1 ms of it exposed; no plan beats the bound, 5.0 ms
advice, each change alone:
  1. leave buckets to the planner: the option bucket='auto' instead of 'module' saves 1.4 ms
  2. the gather of table is exposed 0.904 ms: give it its own unit (fully_shard it), which saves
     0.567 ms
  3. keep head, layers.2, layers.1 and 1 more unsharded from forward to backward
     (reshard_after_forward=False): saves 0.557 ms, takes 332.4 MB more memory, which fits""",
    )


def test_the_verdict_fits_100_columns(explained):
    """With long names, a budget, and a graph break, too."""
    graphs = []
    for graph in explained.graphs:
        long = [replace(c, names=tuple(f"model.decoder.{name}" for name in c.names), reason="memory@" + 60 * "x")
                for c in graph.collectives]  # fmt: skip
        graphs.append(replace(graph, collectives=tuple(long), budget=1e12, from_cache=True))
    breaks = (("a reason of many words " * 9, "train.py:12: " + "x = f(x) " * 12),)
    text = str(replace(explained, graphs=tuple(graphs), graph_breaks=breaks, prefetched={"taken": 10**6}))
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    assert all(name in words for name in ("model.decoder.* (2)", 60 * "x", "1000000 had their first gather"))


def test_a_call_that_breaks_before_its_first_read(explained):
    text = str(replace(explained, graphs=(), graph_breaks=(("print", "train.py:1: print(x)"),)))
    assert "nothing compiled" not in text
    assert "take a step, and ask again" in text


def test_details_fit_100_columns(explained):
    text = str(replace(explained, details=True))
    assert max(map(len, text.splitlines())) <= 100
    first = text[: text.index("[1] backward")].replace("─", "-")
    assert_expected_inline(
        first,
        """\
4 units with 8 sharded parameters, 2 planned graphs, no graph breaks
times are planned for h100 (the option 'hardware': built-in profile, not measured)
[0] forward: 8 parameters read, 102 nodes

              size      at   between      ms   exposed   form   why not earlier   parameters
 --------------------------------------------------------------------------------------------------
 gather   262.1 MB   16-21         0   0.907     0.904   flat   data              table.weight and
                                                                                  1 more
 gather    67.1 MB   20-36         3   0.343     0.034   flat   queue             layers.0.* (2)
 gather    67.1 MB   35-59        11   0.343     0.000   flat   queue             layers.1.* (2)
 gather    67.1 MB   58-78        11   0.343     0.000   flat   compute-limited   layers.2.* (2)

serial 3.495 ms, bound 1.852, planned 2.755 (gap 48.8%, overlap efficiency 45%), exposed 0.937 ms,
contention 0.259 ms, peak 648.4 MB (least 540.5 MB)
with a rate 30% lower or higher, ms: compute 3.259 or 2.518, link 3.251 or 2.520, latency 2.931 or
2.669, contention 2.806 or 2.723, copies 2.873 or 2.720, host 2.755 or 2.755
activations at the peak

  saved   temporary     input   module
 --------------------------------------------------------------------------------------------------
 8.4 MB                         table
                      16.4 kB   the model itself

""",
    )


def test_the_activations_at_the_peak_by_module(explained):
    """Their sum is the part of the peak; a process that takes its code from the cache knows them, too."""
    for graph, data in zip(explained.graphs, explained.to_dict()["graphs"], strict=True):
        assert sum(part.bytes for part in graph.held) == data["peak_parts_bytes"]["activations"]
        assert data["held"] == [asdict(part) for part in graph.held]
        again = GraphReport(graph.phase, graph.reads, graph.param_ids, None)
        again.restore(graph.to_json())
        assert again.held == graph.held
    backward = {(part.module, part.kind): part.bytes for part in explained.graphs[1].held}
    assert {module for module, kind in backward if kind == "saved"} >= {"layers.*.up", "layers.*.down"}
    assert backward["layers.*.up", "saved"] > 0


def test_a_graph_without_collectives():
    with fake_group(1):
        model = fully_shard(nn.Linear(8, 8))
        compiled(model)(torch.ones(4, 8)).sum().backward()
        assert_expected_inline(
            str(explain(model)),
            """\
1 unit with 2 sharded parameters, 2 compiled graphs, no graph breaks
[0] forward: 2 parameters read, no collectives
[1] backward: 2 parameters read, no collectives""",
        )


def test_nothing_is_compiled_yet():
    with fake_group(2):
        assert_expected_inline(
            str(explain(fully_shard(nn.Linear(8, 8)))),
            """\
1 unit with 2 sharded parameters, no compiled graphs, no graph breaks
nothing compiled by backend='compiled_fsdp' yet: call model.compile(backend='compiled_fsdp') and
    then the model, or give explain the call's arguments""",
        )


def test_peaks_consist_of_their_parts(explained):
    for graph in explained.graphs:
        schedule = tuple(timing.launch for timing in graph.simulation.timings)
        parts = memory_parts(graph.tasks, schedule)
        assert tuple(map(sum, parts)) == memory_curve(graph.tasks, schedule) == graph.simulation.curve
        assert all(min(part) >= 0 for part in parts)


def test_json_has_everything_as_plain_data(explained):
    data = json.loads(json.dumps(explained.to_dict()))
    assert data == explained.to_dict()
    assert data["units"] == 4
    assert data["planned_only"]
    assert [advice["text"] for advice in data["advice"]] == [advice.text for advice in explained.advice]
    for graph, report in zip(data["graphs"], explained.graphs, strict=True):
        assert graph["step_s"] == report.simulation.seconds >= graph["lower_bound_s"] > 0
        assert graph["peak_bytes"] == sum(graph["peak_parts_bytes"].values())
        assert {task["kind"] for task in graph["tasks"]} <= {"compute", "gather", "reduce"}
        names = {member["name"] for task in graph["tasks"] for member in task["members"]}
        assert names == {name for collective in graph["collectives"] for name in collective["parameters"]}


class Balanced(html.parser.HTMLParser):
    """Collects text; tags have to be closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_html_escapes_names():
    with fake_group(2):
        model = fully_shard(nn.Sequential(OrderedDict({"<script>&": nn.Linear(8, 8)})))
        page = explain(model, torch.ones(4, 8), options={"codegen": "aot_eager"})._repr_html_()
    assert "<script>" not in page
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert "<script>&" in parser.text
    assert "2 planned graphs" in parser.text


def test_without_rich_details_name_the_extra(explained):
    with fake_group(2), mock.patch.dict(sys.modules, {"rich": None}):
        model = fully_shard(nn.Linear(8, 8))
        assert "nothing compiled by" in str(explain(model))
        with pytest.raises(ImportError, match=r"pip install rich"):
            explain(model, details=True)


def test_a_number_keeps_its_unit_on_its_line():
    for width in range(40, 90):
        lines = wrapped(f"[0] forward {'x' * width} = compute 50.2 ms and 12.9 MB more, of 1,024.5 GB", "    ")
        assert not any(re.match(r"\s*(ms|MB|GB)\b", line) for line in lines)
        assert max(map(len, lines)) <= WIDTH
