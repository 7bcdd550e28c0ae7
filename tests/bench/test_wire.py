"""``bench.wire``: the collectives of a step alone are those of the step."""

import pytest

from bench import wire
from compiled_fsdp import explain, fully_shard
from tests.harness import compiled, loss_of, shard
from tests.harness.fake import fake_group
from tests.harness.hardware import EXCHANGING, GROUPING, SCATTERING
from tests.harness.models import small


@pytest.mark.parametrize(
    ("hardware", "exchange", "one_each"),
    [
        pytest.param(EXCHANGING, True, False, marks=pytest.mark.more),
        pytest.param(SCATTERING, False, False, marks=pytest.mark.more),
        (GROUPING, True, True),
    ],
    ids=["all-to-all", "reduce-scatter", "grouped"],
)
def test_collectives_alone_are_those_of_the_step(hardware, exchange, one_each):
    with fake_group(2):
        model = shard(small(), fully_shard)
        loss_of(compiled(model, hardware=hardware), 0, 0).backward()
        graphs = explain(model).graphs
        alone = wire.of_reports(graphs)
    for phase, graph in zip(alone.phases, graphs, strict=True):
        reduced = {message.exchange for message in phase.messages if message.kind == "reduce"}
        assert reduced == ({exchange} if graph.phase == "backward" else set())
        assert sum(4 * message.numel for message in phase.messages) == sum(c.bucket.bytes for c in graph.collectives)
        if one_each:  # gloo runs a grouped call so
            gathers = [c for c in graph.collectives if c.bucket.kind == "gather"]
            parameters = sum(len(c.bucket.reads) for c in gathers)
            assert sum(message.kind == "gather" for message in phase.messages) == parameters
            assert phase is not alone.phases[0] or parameters > len(gathers)
