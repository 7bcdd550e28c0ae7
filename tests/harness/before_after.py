"""Tests of what a user does to a sharded model before and after its first compiled call."""

import pytest
import torch.nn as nn

from compiled_fsdp import fully_shard
from tests.harness.models import small
from tests.harness.ours import WAYS
from tests.harness.reference import forward_backward, shard

# Before and after the first compiled call; what does not depend on Dynamo's guards goes without a third compile.
times = pytest.mark.parametrize(("way", "when"), [("eager", "before"), ("compiled_fsdp", "after")])


def ready(way: str, when: str, model: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
    """A sharded model and the way to run it, after a step or before any."""
    model = model or shard(small(), fully_shard)
    run = WAYS[way](model)
    if when == "after":
        forward_backward(run, 0)
        model.zero_grad()
    return model, run
