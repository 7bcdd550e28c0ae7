"""Training with codecs as a single process does it: every rank's batch, and each shard encoded and decoded by itself."""

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
    """A step for an unwrapped model that gives the gradients of `world` ranks; its loss is rank `rank`'s."""

    def __init__(
        self, world: int, rank: int, gather: str | None, reduce: str | None, *, block: int = 256, feedback: bool = False
    ) -> None:
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
        for source in range(self.world):
            full = {
                name: by_shard(p.detach(), self.world, lambda rows, _: through(self.gather, rows, self.block))
                for name, p in model.named_parameters()
            }
            for name in names:
                full[name].requires_grad_()
            losses.append(loss_of(lambda x, full=full: functional_call(model, full, (x,)), source, step))
            found = torch.autograd.grad(losses[-1], [full[name] for name in names], allow_unused=True)
            grads.append({name: self.sent(name, g, source) for name, g in zip(names, found, strict=True)})
        for name, p in names.items():

            def added(rows: Tensor, owner: int, name: str = name) -> Tensor:
                start = owner * -(-p.shape[0] // self.world)
                parts = [g[name][start : start + -(-p.shape[0] // self.world)].flatten() for g in grads]
                total = parts[(owner - 1) % self.world]
                for after in range(2, self.world + 1):
                    total = total + parts[(owner - after) % self.world]
                return total / self.world

            p.grad = by_shard(p.detach(), self.world, added)
        return losses[self.rank].detach()
