"""What running passes says of each: a line with its time, and the graph's changes for those who ask."""

import logging
import re

from compiled_fsdp.passes import diff
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, run_passes
from tests.passes.graphs import backward_of_layers, context


def test_a_line_for_each_pass_with_its_time(caplog):
    gm, params, _ = backward_of_layers(layers=2)
    with caplog.at_level(logging.DEBUG, "compiled_fsdp.passes"):
        run_passes(GRAPH_PASSES, gm, context(params, disabled=frozenset({"verify"})))
    lines = [record.getMessage() for record in caplog.records if record.name == "compiled_fsdp.passes.pipeline"]
    assert [re.match(r"backward graph, (\w+): .*, in [\d.]+ ms$", line)[1] for line in lines] == [
        run.__name__ for run in GRAPH_PASSES
    ]
    assert lines[-1].startswith("backward graph, verify: switched off")
    assert not [record for record in caplog.records if record.name == diff.__name__], "nobody has asked"


def test_what_each_pass_changed(caplog):
    gm, params, _ = backward_of_layers(layers=2)
    with caplog.at_level(logging.DEBUG, diff.__name__):
        run_passes(GRAPH_PASSES, gm, context(params))
    changes = {record.args[0]: record.args[1] for record in caplog.records if record.name == diff.__name__}
    assert list(changes) == [f"backward graph, {run.__name__}" for run in GRAPH_PASSES]
    assert changes["backward graph, plan"] == "nothing"
    added = [line for line in changes["backward graph, bucket"].splitlines() if re.match(r"\+ ", line)]
    assert any("launch_gather" in line for line in added)
    assert any(re.match(r"- .*unshard", line) for line in changes["backward graph, bucket"].splitlines())
