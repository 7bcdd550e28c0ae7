"""What running passes says of each: a line with its time, and the graph's changes for those who ask."""

import logging
import re

import pytest
from torch.fx import GraphModule

from compiled_fsdp.buckets.transport import WAIT
from compiled_fsdp.passes import diff, pipeline
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.passes.graph import calls
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, run_passes, through
from compiled_fsdp.passes.start_copies import start_copies
from compiled_fsdp.passes.verify import GraphIsWrong
from tests.passes.graphs import backward_of_layers, context


def test_a_line_for_each_pass_with_its_time(caplog):
    gm, params, _ = backward_of_layers(layers=2)
    with caplog.at_level(logging.DEBUG, "compiled_fsdp.passes"):
        run_passes(GRAPH_PASSES, gm, context(params, disabled_passes=frozenset({"verify"})))
    lines = [record.getMessage() for record in caplog.records if record.name == "compiled_fsdp.passes.pipeline"]
    assert [re.match(r"backward graph, (\w+): .*, in [\d.]+ ms$", line)[1] for line in lines] == [
        run.__name__
        for run in GRAPH_PASSES
        if run is not start_copies  # nothing to do
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
    assert any("gather flat all_gather" in line for line in added)
    assert any(re.match(r"- .*unshard", line) for line in changes["backward graph, bucket"].splitlines())


def test_full_checks_both_halves(monkeypatch):
    """A pass on halves is checked, logged and switched off as any other."""
    forward, params, _ = backward_of_layers(layers=2)
    backward = run_passes(through("lower"), backward_of_layers(layers=2)[0], context(params))

    def clumsy(forward: GraphModule, backward: GraphModule, ctx: PassContext) -> None:
        wait = calls(backward, WAIT)[0]
        wait.replace_all_uses_with(wait.args[0])
        backward.graph.erase_node(wait)

    monkeypatch.setattr(pipeline, "HALVES_PASSES", (clumsy,))
    ctx = context(params, "joint", disabled_passes=frozenset({"clumsy"}), verify_level="full")
    pipeline.run_on_halves(forward, backward, ctx)
    assert ctx.summary == {"clumsy": "switched off"}
    with pytest.raises(GraphIsWrong, match="after clumsy"):
        pipeline.run_on_halves(forward, backward, context(params, "joint", verify_level="full"))
