"""Parameters and modules that are replaced after sharding, before and after the first compiled call.

Right as with FSDP2 where FSDP2 does what the user asked for, else a named error, never silently something else.
"""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grad_norm_

from compiled_fsdp import fully_shard
from compiled_fsdp.frontend import refresh
from tests.harness import (
    Record,
    assert_same,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    shard,
    train,
    variants,
)
from tests.harness.before_after import TIMES, ready, times
from tests.harness.models import small
from tests.harness.reference import Sharding


def another(param: nn.Parameter) -> DTensor:
    """Other values, sharded as `param` is."""
    values = torch.randn(param.shape, generator=torch.Generator().manual_seed(5))
    return distribute_tensor(values, param.device_mesh, param.placements)


def plain_like(values: dict[str, torch.Tensor]) -> nn.Module:
    """The small model with some values replaced before it is sharded."""
    model = small()
    model.load_state_dict(model.state_dict() | values)
    return model


REFUSED: dict[str, tuple[Callable[[nn.Parameter], nn.Parameter], str]] = {
    "a plain parameter": (lambda param: nn.Parameter(torch.ones(param.shape)), "replaced by a Parameter"),
    "another shape": (
        lambda param: nn.Parameter(distribute_tensor(torch.ones(64, 16), param.device_mesh, param.placements)),
        r"replaced by a DTensor \(64, 16\)",
    ),
}


@distributed(world_size=2)
@times
@pytest.mark.parametrize("value", REFUSED)
def test_assigning_what_is_not_sharded_the_same_way(rank, world_size, way, when, value):
    """Refused with the parameter's name. FSDP2 takes it, and goes on with the old value or fails later."""
    model, _ = ready(way, when)
    make, message = REFUSED[value]
    new = make(model.head.weight)
    with pytest.raises(ValueError, match=f"'head.weight' was {message}.*DTensor"):
        model.head.weight = new
    with pytest.raises(ValueError, match=f"'head.weight' was {message}.*DTensor"):
        model.head.register_parameter("weight", new)


@distributed(world_size=2)
@times
def test_a_refused_parameter_is_not_taken_after_all(rank, world_size, way, when):
    """Who catches the error still has the model of before."""
    model, run = ready(way, when)
    was = model.head.weight
    with pytest.raises(ValueError, match=r"'head\.weight' was replaced"):
        model.head.weight = nn.Parameter(torch.ones(61, 16))
    assert model.head.weight is was
    assert_same(train(run, steps=2), fsdp2_record(small(), steps=2))


@distributed(world_size=2)
@times
@pytest.mark.parametrize("how", ["assigned", "frozen", "load_state_dict(assign=True)"])
def test_assigning_a_parameter_sharded_the_same_way(rank, world_size, way, when, how):
    """It is what forward reads and backward trains."""
    model, run = ready(way, when)
    value = another(model.head.weight)
    expected = plain_like({"head.weight": value.full_tensor()})
    if how == "load_state_dict(assign=True)":
        model.load_state_dict(model.state_dict() | {"head.weight": value}, assign=True)
    else:
        model.head.weight = nn.Parameter(value, requires_grad=how != "frozen")
        expected.head.weight.requires_grad_(how != "frozen")
    assert_same(train(run, steps=2), train(fsdp2(expected), steps=2))


@distributed(world_size=2, reset=True)  # a compile of the test's own: Dynamo has to look at the new DTensors
@pytest.mark.parametrize(("way", "when"), variants([*TIMES, ("compiled_fsdp", "before")], *TIMES))
def test_assigning_rows_of_a_full_tensor(rank, world_size, way, when):
    """As transformers loads: rank 1's begin inside of the tensor's memory. They are fewer than rank 0's, so they move
    into a padded shard; equal sizes stay where they are."""
    model, run = ready(way, when)
    values = {name: another(model.get_parameter(name)).full_tensor() for name in ("head.weight", "blocks.0.up.weight")}
    expected = plain_like(values)
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        old = model.get_parameter(name)
        rows = value.chunk(world_size)[rank]
        with torch.no_grad():
            new = DTensor.from_local(
                rows, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
            )
            setattr(model.get_submodule(path), attribute, nn.Parameter(new))
    assert_same(train(run, steps=2), train(fsdp2(expected), steps=2))


@distributed(world_size=2)
@times
@pytest.mark.parametrize("how", ["embedding", "head", "load_state_dict(assign=True)"])
def test_assigning_a_tied_parameter(rank, world_size, way, when, how):
    """In one of its places or in each, it stays one parameter. FSDP2 forgets what the second place was given, in the
    next forward, and lists two parameters until then."""

    def tied(seed: int) -> nn.Module:
        model = small(seed)
        model.head.weight = model.embedding.weight
        return model

    model, run = ready(way, when, shard(tied(0), fully_shard))
    state = shard(tied(1), fully_shard).state_dict()
    if how in ("embedding", "head"):
        getattr(model, how).weight = nn.Parameter(state.pop("head.weight"))
        del state["embedding.weight"]
        model.load_state_dict(state, strict=False)
    else:
        model.load_state_dict(state, assign=True)
    assert model.embedding.weight is model.head.weight
    assert_same(train(run, steps=2), fsdp2_record(tied(1), steps=2))
    assert torch.equal(*(model.state_dict()[f"{place}.weight"].full_tensor() for place in ("embedding", "head")))


@distributed(world_size=2)
@pytest.mark.parametrize(("way", "when"), variants(TIMES, TIMES[0]))
def test_a_bias_set_to_none(rank, world_size, way, when):
    """Forward goes without, loading too, and it can be put back."""
    model, run = ready(way, when)
    other, bias = fsdp2(small()), model.norm.bias
    with torch.no_grad():  # the initial ones are zero
        for target in (bias, other.norm.bias):
            target.copy_(another(target))
    model.norm.bias = None
    reference = small()
    reference.norm.bias = None
    assert torch.equal(forward_backward(run, 1), forward_backward(fsdp2(reference), 1))
    assert bias.grad is None
    state = model.state_dict()
    assert "norm.bias" not in state
    assert not any(model.load_state_dict(state))
    model.norm.bias = bias
    model.zero_grad()
    assert torch.equal(forward_backward(run, 1), forward_backward(other, 1))
    assert torch.equal(bias.grad.full_tensor(), other.norm.bias.grad.full_tensor())


@distributed(world_size=2, reset=True)  # Dynamo keeps the graph up to the error for equal models that follow
@times
def test_a_deleted_bias(rank, world_size, way, when):
    """As of a plain module, reading it is an error, and loading goes without."""
    model, run = ready(way, when)
    del model.norm.bias
    assert not any(model.load_state_dict(model.state_dict()))
    with pytest.raises(Exception, match="no attribute 'bias'"):
        forward_backward(run, 1)


@distributed(world_size=2)
@times
@pytest.mark.parametrize("how", ["copy_", "data.copy_", "data.mul_", "to_local().zero_"])
def test_values_written_in_place(rank, world_size, way, when, how):

    def write(param: nn.Parameter) -> None:
        with torch.no_grad():
            match how:
                case "copy_":
                    param.copy_(another(param))
                case "data.copy_":
                    param.data.copy_(another(param))
                case "data.mul_":
                    param.data.mul_(1.5)
                case _:
                    param.to_local().zero_()

    model, run = ready(way, when)
    reference = fsdp2(small())
    for target in (model, reference):
        write(target.head.weight)
    assert not torch.equal(model.head.weight.full_tensor(), small().head.weight)
    assert_same(train(run, steps=2), train(reference, steps=2))


@distributed(world_size=2)
@times
@pytest.mark.parametrize("kind", ["DTensor", "plain"])
def test_data_assigned(rank, world_size, way, when, kind):
    """Torch lets a DTensor's `.data` be assigned and changes nothing that computes. What the parameter shows is what
    forward reads."""
    model, run = ready(way, when)
    value = another(model.head.weight)
    model.head.weight.data = value if kind == "DTensor" else value.full_tensor()
    shown = plain_like({"head.weight": model.head.weight.full_tensor()})
    assert_same(train(run, steps=2), train(fsdp2(shown), steps=2))


@distributed(world_size=2)
@times
def test_swapped_tensors(rank, world_size, way, when):
    """`torch.utils.swap_tensors` puts another DTensor into the same Python object, and tells nobody."""
    model, run = ready(way, when)
    value = another(model.head.weight)
    expected = train(fsdp2(plain_like({"head.weight": value.full_tensor()})), steps=2)
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(value))
    assert_same(train(run, steps=2), expected)


@distributed(world_size=2)
@times
@pytest.mark.parametrize("what", ["to", "load_state_dict"])
def test_swapping_on_conversion(rank, world_size, way, when, what):
    """The setting that makes modules swap tensors where they would assign `.data`."""
    model, run = ready(way, when)
    value = another(model.head.weight)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if what == "to":
            model.to(torch.float64)
        else:
            model.load_state_dict(model.state_dict() | {"head.weight": value})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    expected = small().double() if what == "to" else plain_like({"head.weight": value.full_tensor()})
    assert_same(train(run, steps=2), train(fsdp2(expected), steps=2))


class Row(nn.Linear):
    """One output: a matrix of one row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@distributed(world_size=2)
def test_swapped_tensors_without_rows(rank, world_size):
    """The second rank has no row of a weight, so no memory to tell tensors apart by; and no graph breaks, swapped or
    not."""
    torch.manual_seed(0)
    model = fully_shard(Row(4, 1))
    run = compiled(model, fullgraph=True)
    x = torch.full((2, 4), rank + 1.0, requires_grad=True)
    with mock.patch.object(refresh, "refresh", side_effect=AssertionError):
        run(x)
    for expected in (torch.ones(1, 4), torch.zeros(1, 4)):
        value = distribute_tensor(expected, model.weight.device_mesh, model.weight.placements)
        torch.utils.swap_tensors(model.weight, nn.Parameter(value))
        out = run(x)
        assert torch.equal(out, x @ expected.t() + model.bias.full_tensor())
        out.sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((1, 4), 3.0))


@distributed(world_size=2)
@times
@pytest.mark.parametrize("what", ["a unit", "all but the head", "one parameter"])
def test_frozen_and_thawed_after_sharding(rank, world_size, way, when, what):
    """Gradients are there and not there as FSDP2 has them, step by step; so is what clipping makes of them."""

    def chosen(model: nn.Module) -> list[nn.Parameter]:
        match what:
            case "a unit":
                return list(model.blocks[0].parameters())
            case "one parameter":
                return [model.blocks[0].up.weight]
            case _:
                return [param for param in model.parameters() if param is not model.head.weight]

    def step(model: nn.Module, index: int) -> torch.Tensor:
        for param in chosen(model):
            param.requires_grad_(index == 1)
        loss = forward_backward(model, index)
        clip_grad_norm_(model.parameters(), 0.1)
        return loss

    _, run = ready(way, when)
    expected = train(fsdp2(small()), step)
    assert any(value is None for value in expected.gradients[0].values())
    assert_same(train(run, step), expected)


def new_head() -> nn.Module:
    return small(seed=9).head


def head_sharded(model: nn.Module, function: Sharding) -> None:
    model.head = function(new_head())


def block_sharded(model: nn.Module, function: Sharding) -> None:
    model.blocks[0] = function(small(seed=9).blocks[0])


def blocks_appended(model: nn.Module, function: Sharding) -> None:
    model.blocks.append(function(small(seed=9).blocks[0]))


def blocks_dropped(model: nn.Module, function: Sharding) -> None:
    del model.blocks[0]


def head_in_place(model: nn.Module, function: Sharding) -> None:
    model.head.requires_grad_(False)
    model.head = nn.Sequential(model.head, nn.Tanh())  # its parameter stays with the root's unit


SURGERY = {f.__name__: f for f in (head_sharded, block_sharded, blocks_appended, blocks_dropped, head_in_place)}


REPLACED = [(what, *time) for what in SURGERY for time in TIMES]
SLOW = [(what, *TIMES[1]) for what in ("block_sharded", "blocks_appended")]


@distributed(world_size=2)
@pytest.mark.parametrize(("what", "way", "when"), variants(REPLACED, *(case for case in REPLACED if case not in SLOW)))
def test_a_submodule_replaced(rank, world_size, way, when, what):
    """By one that is sharded itself, by more, by none, or by a module around the old one."""
    model, run = ready(way, when)
    reference = fsdp2(small())
    for target, function in ((model, fully_shard), (reference, torch_fully_shard)):
        SURGERY[what](target, function)
    assert_same(train(run, steps=2), train(reference, steps=2))


@distributed(world_size=2)
@times
def test_a_submodule_replaced_by_a_plain_one(rank, world_size, way, when):
    """It is not sharded, so its gradients are this rank's own, as with FSDP2."""

    def local(run: nn.Module, model: nn.Module) -> Record:
        record = Record()
        record.losses.append(forward_backward(run, 1))
        record.gradients.append({"head.weight": model.head.weight.grad.clone()})
        record.gradients[0] |= {n: p.grad.full_tensor() for n, p in model.named_parameters() if n != "head.weight"}
        record.parameters.append({})
        return record

    model, run = ready(way, when)
    reference = fsdp2(small())
    for target in (model, reference):
        target.head = new_head()
    assert not isinstance(model.head.weight, DTensor)
    assert_same(local(run, model), local(reference, reference))
