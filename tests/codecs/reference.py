"""Training with codecs as a single process does it: each rank's batch, each shard encoded and decoded by itself."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tests.harness.models import loss_of


def through(codec: str | None, x: Tensor, block: int = 256) -> Tensor:
    """What is received of `x`, one-dimensional, in float32."""
    if codec is None:
        return x.float()
    if codec == "bfloat16":
        return x.bfloat16().float()
    blocks = F.pad(x.float(), (0, -x.numel() % block)).view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True) / (127 if codec == "int8" else 448)
    inverse = torch.where(scale == 0, 0, 1 / scale)
    scaled = blocks * inverse
    held = scaled.round() if codec == "int8" else scaled.to(torch.float8_e4m3fn).float()
    return (held * scale).view(-1)[: x.numel()]


def by_shard(full: Tensor, world: int, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    """`change(rows, rank)` of each rank's rows of `full`, flat, put together again."""
    rows = -(-full.shape[0] // world)
    return torch.cat([change(p.flatten(), r).view_as(p) for r, p in enumerate(full.split(rows))]) if rows else full


class Reference:
    """A step for an unwrapped model that gives the gradients of `replicas * world` ranks, of which `world` shard.

    Its loss is rank `rank`'s, of `microbatches` whose gradients are sent once.
    """

    def __init__(
        self, world: int, rank: int, gather: str | None, reduce: str | None, *, block: int = 256,
        feedback: bool = False, replicas: int = 1, microbatches: int = 1,
    ) -> None:  # fmt: skip
        self.replicas, self.microbatches = replicas, microbatches
        self.world, self.rank, self.gather, self.reduce, self.block = world, rank, gather, reduce, block
        self.residuals: dict[tuple[str, int], Tensor] | None = {} if feedback else None

    def sent(self, name: str, grad: Tensor, source: int) -> Tensor:
        """What the ranks receive of one rank's full gradient."""
        left = None if self.residuals is None else self.residuals.get((name, source))
        grad = grad if left is None else left + grad
        sent = by_shard(grad, self.world, lambda rows, _: through(self.reduce, rows, self.block))
        if self.residuals is not None:
            self.residuals[name, source] = grad - sent
        return sent

    def __call__(self, model: nn.Module, step: int) -> Tensor:
        names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        losses, grads = [], []
        for source in range(self.replicas * self.world):
            full = {
                name: by_shard(p.detach(), self.world, lambda rows, _: through(self.gather, rows, self.block))
                for name, p in model.named_parameters()
            }
            for name in names:
                full[name].requires_grad_()
            total = None
            for micro in range(self.microbatches):
                losses.append(loss_of(lambda x, full=full: functional_call(model, full, (x,)), source, step + micro))
                found = torch.autograd.grad(losses[-1], [full[name] for name in names])
                total = found if total is None else [new + old for new, old in zip(found, total, strict=True)]
            grads.append({name: self.sent(name, g, source) for name, g in zip(names, total, strict=True)})
        for name, p in names.items():

            def added(_: Tensor, owner: int, name: str = name, rows: int = -(-p.shape[0] // self.world)) -> Tensor:
                parts = [g[name][owner * rows : (owner + 1) * rows].flatten() for g in grads]
                replicas = [parts[i : i + self.world] for i in range(0, len(parts), self.world)]
                averages = []
                for of in replicas:
                    total = of[(owner - 1) % self.world]
                    for after in range(2, self.world + 1):
                        total = total + of[(owner - after) % self.world]
                    averages.append(total / self.world)
                return sum(averages) / self.replicas if self.replicas > 1 else averages[0]

            p.grad = by_shard(p.detach(), self.world, added)
        return losses[(self.rank + 1) * self.microbatches - 1].detach()
