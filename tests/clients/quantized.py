"""Models whose weights are tensors of torchao's: 64 features in, 64 out; their training, and what they hold."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.quantized_training import int8_mixed_precision_training, int8_weight_only_quantized_training
from torchao.quantization import quantize_, to_nf4
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

from tests.harness.models import seeded

DIM = 64


class LoRA(nn.Module):
    """A frozen weight in NF4, and an adapter that trains."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.randn(dim, dim) / 8, 16, 16), requires_grad=False)
        self.down, self.up = nn.Linear(dim, 8, bias=False), nn.Linear(8, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(linear_nf4(x, self.weight) + self.up(self.down(x)))


def _linears() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU()) for _ in range(2)])


def _float8() -> nn.Module:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(_linears().to(torch.bfloat16), config=config)


def _quantized(config: Callable) -> nn.Module:
    model = _linears()
    quantize_(model, config())
    return model


KINDS = {
    "WeightWithDynamicFloat8CastTensor": _float8,
    "NF4Tensor": lambda: nn.Sequential(LoRA(), LoRA()),
    "Int8MixedPrecisionTrainingLinearWeight": partial(_quantized, int8_mixed_precision_training),
    "Int8QuantizedTrainingLinearWeight": partial(_quantized, int8_weight_only_quantized_training),
}
"""By the class of their weights."""


def sharded(kind: str, shard_by: Callable, seed: int = 0) -> nn.Module:
    """Such a model; int8 tensors need a ``param_dtype``."""
    model = seeded(KINDS[kind], seed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy} if kind.startswith("Int8") else {}
    for layer in model:
        shard_by(layer, **options)
    return shard_by(model, **options)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, alike: bool = False) -> torch.Tensor:
    """The loss of a step; ``alike``: on the same rows on each rank, so that it is the same with more ranks."""
    torch.manual_seed(step)  # int8 weights are rounded at random
    dtype = next(param.dtype for param in model.parameters() if param.requires_grad)
    generator = torch.Generator().manual_seed(10 * step + (0 if alike else dist.get_rank()))
    loss = model(torch.randn(32, DIM, generator=generator).to(dtype)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def held(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a (sharded) tensor is made of on this rank."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from held(getattr(tensor, name))
    else:
        yield tensor.detach().clone()
