"""Parametrization of tests in which the user changes a sharded model before or after its first compiled call."""

import pytest
import torch.nn as nn

from compiled_fsdp import fully_shard
from tests.harness.models import small
from tests.harness.ours import WAYS
from tests.harness.reference import forward_backward, shard

# Two combinations suffice for tests that do not depend on Dynamo's guards; a third one would be one more compile.
TIMES = [("eager", "before"), ("compiled_fsdp", "after")]
times = pytest.mark.parametrize(("way", "when"), TIMES)


def ready(way: str, when: str, model: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model and the callable that runs it. With `when` "after" it has run a step."""
    model = model or shard(small(), fully_shard)
    run = WAYS[way](model)
    if when == "after":
        forward_backward(run, 0)
        model.zero_grad()
    return model, run
