"""Models that are sharded on the meta device, or moved there, then materialized."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from compiled_fsdp import fully_shard
from tests.harness import (
    assert_same,
    compiled,
    distributed,
    forward_backward,
    fsdp2_record,
    loss_of,
    shard,
    train,
    variants,
)
from tests.harness.before_after import TIMES, ready, times
from tests.harness.models import small
from tests.harness.reference import full


@distributed(world_size=2)
@pytest.mark.parametrize("root_only", variants([False, True], False))
def test_meta_then_to_empty_then_values(rank, world_size, root_only):
    """Materialized by reset_parameters, or by loading."""
    with torch.device("meta"):
        model = small()
    if root_only:
        fully_shard(model)
    else:
        shard(model, fully_shard)
    assert all(param.is_meta and isinstance(param, DTensor) for param in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    plain = small()
    plain.load_state_dict({name: full(param) for name, param in model.named_parameters()})
    loss = loss_of(model, 0, 0)
    assert loss.isfinite()
    assert torch.equal(loss, loss_of(plain, 0, 0)), "a forward reads the new values"
    set_model_state_dict(model, small().state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_same(train(compiled(model), steps=2), fsdp2_record(small(), steps=2))


@distributed(world_size=2)
@times
def test_emptied_and_loaded(rank, world_size, way, when):
    """`to_empty` gives parameters other memory, and loading fills it."""
    model, run = ready(way, when)
    model.to_empty(device="cpu")
    set_model_state_dict(model, small(seed=1).state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_same(train(run, steps=2), fsdp2_record(small(seed=1), steps=2))


@distributed(world_size=2, reset=True)  # as above
@pytest.mark.parametrize(("way", "when"), variants(TIMES, TIMES[0]))
def test_moved_to_meta(rank, world_size, way, when):
    """There is nothing to compute with until `to_empty`; the error names the parameters."""
    model, run = ready(way, when)
    model.to("meta")
    with pytest.raises(RuntimeError, match=r"(?s)materialized from meta device.*'head\.weight'"):
        forward_backward(run, 1)
