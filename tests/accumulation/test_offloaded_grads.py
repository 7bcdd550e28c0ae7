"""Gradients of offloaded parameters on their way to host memory, with a stream that is not there."""

from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy

from compiled_fsdp import fully_shard
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.runtime.accumulate_grad import accumulate_grad, run_hooks
from compiled_fsdp.runtime.offloaded_grads import OffloadedGrads
from compiled_fsdp.runtime.prefetcher import AllGatherPrefetcher
from compiled_fsdp.runtime.reducer import GradReducer
from compiled_fsdp.state.registry import unit_of
from tests.harness.fake import fake_group


@pytest.fixture
def stream():
    """A device's stream: its events count how often the host waits for one."""
    found = mock.Mock()
    with mock.patch.object(torch.accelerator, "current_stream", return_value=found):
        yield found


@pytest.fixture
def parameters():
    with fake_group(2):
        model = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))
        yield units_of(model)[0].parameters


def waited(stream) -> int:
    return stream.record_event.return_value.synchronize.call_count


def test_the_host_waits_once(stream, parameters):
    offloaded = OffloadedGrads()
    assert offloaded.idle
    for parameter in parameters:
        offloaded.accumulate(parameter, torch.ones_like(parameter.valid_rows()))
    assert not offloaded.idle
    assert waited(stream) == 0
    offloaded.finish()
    offloaded.finish()
    assert waited(stream) == 1
    assert offloaded.idle
    assert all(parameter.param.grad.to_local().eq(1).all() for parameter in parameters)


def test_what_is_added_is_added_when_it_is_there(stream, parameters):
    weight = parameters[0]
    offloaded = OffloadedGrads()
    for value in (1.0, 2.0, 4.0):
        offloaded.accumulate(weight, torch.full_like(weight.valid_rows(), value))
    grad = weight.param.grad.to_local()
    assert grad.eq(1).all()
    offloaded.finish()
    assert grad.eq(7).all()


def test_hooks_see_the_whole_gradient(stream, parameters):
    weight, seen = parameters[0], []
    weight.param.register_post_accumulate_grad_hook(
        lambda param: seen.append((waited(stream), param.grad.to_local()[0, 0].item()))
    )
    offloaded, prefetcher = OffloadedGrads(), AllGatherPrefetcher()
    for value in (1.0, 2.0):
        offloaded.accumulate(weight, torch.full_like(weight.valid_rows(), value))
    run_hooks(weight, prefetcher, offloaded)
    assert seen == [(1, 3.0)]


def test_gradients_that_are_where_their_shard_is_do_not_wait(stream, parameters):
    offloaded = OffloadedGrads()
    for parameter in parameters:
        accumulate_grad(parameter, unit_of(parameter), torch.ones_like(parameter.shard), offloaded=offloaded)
    assert offloaded.idle
    stream.record_event.assert_not_called()


def test_a_failed_backward_leaves_nothing_on_its_way(stream, parameters):
    """In compiled autograd's graph too, which the reducer knows as no backward of its own."""
    reducer = GradReducer(AllGatherPrefetcher())
    reducer._accumulate(parameters[0], unit_of(parameters[0]), torch.ones_like(parameters[0].shard))
    reducer._offloaded.accumulate(parameters[0], torch.ones_like(parameters[0].valid_rows()))
    assert not reducer.idle
    reducer.close_failed()
    assert reducer.idle
    assert parameters[0].param.grad.to_local().eq(2).all()
