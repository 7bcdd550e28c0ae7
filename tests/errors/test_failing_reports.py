"""What only tells people of a compile can fail without failing the compile."""

from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from compiled_fsdp import explain, fully_shard
from tests.harness import compiled
from tests.harness.fake import fake_group

# what fails, and what the line that says so calls it
TOLD = {
    "compiled_fsdp.passes.plan_pass.balance": "balance of compute and communication",
    "compiled_fsdp.compiler.compilation.collectives_of": "places of collectives",
    "compiled_fsdp.reporting.lines.log_graph": "line for a compiled graph",
    "compiled_fsdp.compiler.compilation._text": "text of a graph",
    "compiled_fsdp.reporting.compile_log.CompileLog.collect_failed_frames": "frames that Dynamo gave up on",
    "compiled_fsdp.compiler.unintended.int_attribute_recompiled_for": "reason for a compile",
    "compiled_fsdp.compiler.compilation.graph_break_of": "reason for a graph break",
}


@pytest.mark.parametrize("name", TOLD)
def test_reports_that_fail(name, caplog):
    with fake_group(2), caplog.at_level("DEBUG", "compiled_fsdp"):
        model = fully_shard(nn.Linear(8, 8))
        with mock.patch(name, side_effect=IndexError("of the test's")):
            compiled(model, fullgraph=True)(torch.ones(4, 8)).sum().backward()
        assert model.weight.grad is not None
        assert [graph.phase for graph in explain(model).graphs] == ["forward", "backward"]
        assert "2 compiled graphs" in str(explain(model))
    assert any(f"no {TOLD[name]}" in line and "of the test's" in line for line in caplog.text.splitlines())


class Cached(nn.Module):
    """Attention over keys and values of earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, keys, values):
        keys, values = torch.cat([keys, self.keys(x)], 2), torch.cat([values, self.values(x)], 2)
        return F.scaled_dot_product_attention(x, keys, values), keys, values


def test_lengths_of_a_cache():
    """Those of keys and of values are two symbols, as in generation after training; torch's count of operations refuses
    them."""
    with fake_group(2), torch.fx.experimental._config.patch(use_duck_shape=False):
        model = fully_shard(Cached())
        run = torch.compile(model, backend="compiled_fsdp", dynamic=True, options={"codegen": "aot_eager"})
        with torch.no_grad():
            out, keys, _ = run(*(torch.ones(2, 2, length, 8) for length in (3, 6, 6)))
        assert (out.shape, keys.shape) == ((2, 2, 3, 8), (2, 2, 9, 8))
        assert explain(model).graphs[0].balance is not None
