"""`grad_dtype` of parameters: gradients that wait, reductions and `.grad` have it, as with torch 2.15's FSDP2."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import compiled_autograd, explain, fully_shard
from tests.harness import WAYS, compiled, distributed, forward_backward, shard, variants
from tests.harness.meshes import mesh_2d
from tests.harness.models import BUILD, small
from tests.harness.reference import assert_equal, full_gradients

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
FSDP2_HAS_IT = torch.__version__ >= "2.15"
"""Before, FSDP2 loses it."""

Sharding = Callable[..., nn.Module]


def with_grad_dtype(model: nn.Module, dtype: torch.dtype | None, *, matrices_alone: bool = False) -> nn.Module:
    for param in model.parameters():
        if param.dim() > 1 or not matrices_alone:
            param.grad_dtype = dtype
    return model


def waiting(call: nn.Module, index: int) -> torch.Tensor:
    """Three microbatches, of which two wait."""
    root = getattr(call, "_orig_mod", call)
    for number in range(3):
        root.set_requires_gradient_sync(number == 2)
        loss = forward_backward(call, 3 * index + number)
    return loss


def all_reduced(call: nn.Module, index: int) -> torch.Tensor:
    """Two microbatches, whose gradients are added up in `.grad`."""
    forward_backward(call, index)
    return forward_backward(call, index + 1)


# the model's dtype, grad_dtype, where it is set, and the policy
CASES = {
    "wider": (bf16, fp32, {}, {}),
    "wider, of some": (bf16, fp32, {"matrices_alone": True}, {}),
    "wider than what is computed": (fp32, fp32, {}, {"param_dtype": bf16}),
    "wider, reduced in half": (bf16, fp32, {}, {"reduce_dtype": bf16}),
    "narrower": (fp32, bf16, {}, {}),
    "as they come": (bf16, None, {}, {}),
    "as they come from half": (fp32, None, {}, {"param_dtype": bf16}),
    "as they are reduced": (bf16, None, {}, {"reduce_dtype": fp32}),
}


@pytest.mark.skipif(not FSDP2_HAS_IT, reason="FSDP2 has it from torch 2.15")
@pytest.mark.parametrize(
    ("run", "build", "cases"),
    [
        ("eager", "whole", list(CASES)),
        ("compiled_fsdp", "whole", ["wider, of some", "narrower", "as they come from half"]),
        ("compiled_fsdp", "broken", ["wider, of some"]),
        *(
            pytest.param("compiled_fsdp", build, [case], marks=pytest.mark.more)
            for build in ("whole", "broken")
            for case in CASES
        ),
    ],
    ids=lambda value: f"{len(value)} cases" if isinstance(value, list) and len(value) > 1 else str(value),
)
@distributed(world_size=2)
def test_equal_to_fsdp2(rank, world_size, run, build, cases):
    """In which dtype gradients wait, are reduced and accumulated."""
    for case in cases:
        dtype, grad_dtype, where, policy = CASES[case]
        model = with_grad_dtype(BUILD[build]().to(dtype), grad_dtype, **where)
        models = [shard(model, fully_shard, mp_policy=MixedPrecisionPolicy(**policy))]
        model = with_grad_dtype(BUILD[build]().to(dtype), grad_dtype, **where)
        models.append(shard(model, torch_fully_shard, mp_policy=MixedPrecisionPolicy(**policy)))
        calls = [WAYS[run](models[0]), models[1]]
        for step in (waiting, all_reduced):
            losses = [step(call, 0) for call in calls]
            assert torch.equal(*losses), case
            mine, theirs = (dict(model.named_parameters()) for model in models)
            for name, param in mine.items():
                assert param.grad_dtype == theirs[name].grad_dtype, (case, name)
                assert param.grad.dtype == param.grad.to_local().dtype == theirs[name].grad.dtype, (case, name)
            try:
                assert_equal(*(full_gradients(model) for model in models))
            except AssertionError as error:
                raise AssertionError(f"{case}, {step.__name__}") from error
            for model in models:
                model.zero_grad()


class Wide(nn.Module):
    """A parameter that is computed with in bfloat16, whose gradient is in float32 and is no number of bfloat16."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.float() + 2**-10

    def __init__(self, dtype: torch.dtype = bf16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.Function.apply(self.weight) * x


def check_wide_gradients(rank: int, world_size: int) -> None:
    """With FSDP2's result, uncompiled; a graph of AOTAutograd's brings gradients as they come in the parameter's own
    dtype, with FSDP2 too."""
    policies = {None: {}, fp32: {}, bf16: {}, "by policy": {"param_dtype": bf16, "reduce_dtype": fp32}}
    for grad_dtype, policy in policies.items():
        found = []
        for by in (torch_fully_shard, fully_shard):
            model = Wide(fp32 if policy else bf16)
            if not policy:
                model.weight.grad_dtype = grad_dtype
            by(model, mp_policy=MixedPrecisionPolicy(**policy))
            for waits in (False, True):
                model.set_requires_gradient_sync(not waits)
                model(torch.full((3,), 1.0 + rank, dtype=bf16)).sum().backward()
            model.set_requires_gradient_sync(True)
            model(torch.full((3,), 1.0, dtype=bf16)).sum().backward()
            found.append(model.weight.grad)
        assert found[0].dtype == found[1].dtype == (bf16 if grad_dtype is bf16 else fp32)
        assert torch.equal(*(grad.full_tensor() for grad in found)), (grad_dtype, found)
    for grad_dtype in (None, fp32):
        model = Wide()
        model.weight.grad_dtype = grad_dtype
        fully_shard(model)
        compiled(model)(torch.full((3,), 1.0 + rank, dtype=bf16)).sum().backward()
        assert model.weight.grad.dtype == (grad_dtype or bf16)
        average = sum(range(1, world_size + 1)) / world_size
        assert model.weight.grad.full_tensor().eq(average if grad_dtype is None else average + 2**-10).all()


@pytest.mark.skipif(not FSDP2_HAS_IT, reason="autograd's engine casts it before torch 2.15")
@distributed(world_size=2)
def test_gradients_that_are_wider_than_their_parameter(rank, world_size):
    check_wide_gradients(rank, world_size)


@pytest.mark.skipif(not FSDP2_HAS_IT, reason="autograd's engine casts it before torch 2.15")
@distributed(world_size=1)
def test_gradients_that_are_wider_than_their_parameter_on_one_rank(rank, world_size):
    check_wide_gradients(rank, world_size)


@pytest.mark.parametrize("run", WAYS)
@distributed(world_size=2)
def test_sums_that_bfloat16_cannot_hold(rank, world_size, run):
    """256 + 1 - 256, on any torch: of gradients that wait, and in `.grad`; set before or after sharding."""
    for before in (True, False):
        for policy in ({}, {"reduce_dtype": fp32}):
            for waits in (True, False):
                model = nn.Linear(1, 3, bias=False, dtype=bf16)
                if before:
                    model.weight.grad_dtype = fp32
                fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
                model.weight.grad_dtype = fp32
                call = WAYS[run](model)
                for number, value in enumerate((256, 1, -256)):
                    model.set_requires_gradient_sync(not waits or number == 2)
                    call(torch.full((1, 1), float(value), dtype=bf16)).sum().backward()
                assert model.weight.grad_dtype == model.weight.grad.dtype == fp32
                assert model.weight.grad.full_tensor().eq(1).all(), (before, policy, waits, model.weight.grad)
                model.weight.grad = torch.ones_like(model.weight, dtype=fp32)  # by hand


@distributed(world_size=2)
def test_conversions(rank, world_size):
    """An explicit `grad_dtype` and the gradient in it outlive `to()`; a parameter that is loaded by `assign` inherits
    it. One that was never set goes with the parameter."""
    for by in (fully_shard, torch_fully_shard) if FSDP2_HAS_IT else (fully_shard,):
        model = small().to(bf16)
        model.head.weight.grad_dtype = fp32
        by(model)
        model.embedding.weight.grad_dtype = fp32
        forward_backward(model, 0)
        grads = full_gradients(model)
        model.to(fp16)
        for name, param in model.named_parameters():
            wide = name in ("head.weight", "embedding.weight")
            assert param.dtype == fp16
            assert param.grad_dtype == param.grad.dtype == (fp32 if wide else fp16), name
            assert torch.equal(param.grad.full_tensor(), grads[name].to(param.grad.dtype)), name
        model.zero_grad()
        state = {name: value.detach().to(bf16) for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert model.head.weight.dtype == bf16
        assert model.head.weight.grad_dtype == fp32
        assert model.position.weight.grad_dtype == bf16
        if by is fully_shard:
            for call in (model, compiled(model)):
                model.zero_grad()
                forward_backward(call, 0)
                for name, param in model.named_parameters():
                    assert torch.equal(param.grad.full_tensor(), grads[name]), name


# What is compiled.
RUNS = {"nothing": WAYS["eager"], "module": compiled, "function": lambda model: compiled(model.forward_)}


@distributed(world_size=2)
@pytest.mark.parametrize("what", variants(RUNS, "nothing", "function"))
def test_set_after_the_first_forward(rank, world_size, what):
    """It counts from the next forward on; where the forward is a part of a larger compiled function, which looks at no
    DTensor, it is an error that names the parameter."""
    model = shard(small().to(bf16), fully_shard)
    model.forward_ = lambda tokens: model(tokens)
    call = RUNS[what](model)
    forward_backward(call, 0)
    model.zero_grad()
    model.head.weight.grad_dtype = fp32
    if what == "function":
        with pytest.raises(RuntimeError, match=r"gradient of 'head.weight' is torch.bfloat16, but its grad_dtype"):
            forward_backward(call, 0)
        model.zero_grad()
        torch._dynamo.reset()
    forward_backward(call, 0)
    assert model.head.weight.grad.dtype == fp32
    if what != "function":  # and back
        model.zero_grad()
        model.head.weight.grad_dtype = bf16
        forward_backward(call, 0)
        assert model.head.weight.grad.dtype == model.head.weight.grad_dtype == bf16


@distributed(world_size=2)
def test_unused_parameters_need_a_dtype(rank, world_size):
    """Zero gradients for a parameter that takes gradients of any dtype: ranks do not know in which."""
    for policy in ({}, {"reduce_dtype": fp32}):
        for run in WAYS.values():
            model = with_grad_dtype(small().to(bf16), None)
            fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
            model.set_reduce_scatter_unused_params(True)
            if policy:
                forward_backward(run(model), 0)
                assert {param.grad.dtype for param in model.parameters()} == {fp32}
                continue
            with pytest.raises(Exception, match="requires an explicit MixedPrecisionPolicy"):
                forward_backward(run(model), 0)


@pytest.mark.parametrize("run", variants(WAYS, "eager"))
@distributed(world_size=4)
def test_replicas(rank, world_size, run):
    """What waits for the replicas is in the wider dtype, too."""
    mesh = mesh_2d("replicas", "shards")
    models = []
    for by in (fully_shard, torch_fully_shard) if FSDP2_HAS_IT else (fully_shard,):
        model = with_grad_dtype(small().to(bf16), fp32, matrices_alone=True)
        models.append(shard(model, by, mesh=mesh))
    calls = [WAYS[run](models[0]), *models[1:]]
    for call, model in zip(calls, models, strict=True):
        model.set_requires_all_reduce(False)
        forward_backward(call, 0)
        assert all(param.grad is None for param in model.parameters())
        model.set_requires_all_reduce(True)
        forward_backward(call, 1)
        for name, param in model.named_parameters():
            assert param.grad.dtype == (fp32 if param.dim() > 1 else bf16), name
    if len(models) > 1:
        torch.testing.assert_close(*(full_gradients(model) for model in models), rtol=1e-6, atol=1e-8)


@pytest.mark.more
@distributed(world_size=2)
def test_in_graphs(rank, world_size):
    """Gradients are cast once, where the bucket is packed; a budget counts what `.grad` holds; with compiled autograd
    it is the same."""
    gradients, persistent = [], []
    for dtype in (fp32, bf16):
        model = shard(with_grad_dtype(small().to(bf16), dtype), fully_shard)
        call = compiled(model)
        forward_backward(call, 0)
        gradients.append(full_gradients(model))
        graphs = explain(model).graphs
        name = str(dtype).removeprefix("torch.")
        assert {read.reduce_text for graph in graphs for read in graph.reads} == {f"{name} avg"}
        persistent.append(graphs[-1].tasks.persistent)
    elements = sum(-(-param.shape[0] // world_size) * param[:1].numel() for param in small().parameters())
    assert persistent[0] - persistent[1] == elements * (fp32.itemsize - bf16.itemsize)
    model = shard(with_grad_dtype(small().to(bf16), fp32), fully_shard)
    with compiled_autograd(codegen="aot_eager"):
        forward_backward(compiled(model), 0)
    assert_equal(full_gradients(model), gradients[0])
