"""Send texts between ranks as tensors of bytes; ``broadcast_object_list`` and the like would unpickle received data."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_text(text: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the ``text`` of the group's first rank on all of its ranks: a collective call."""
    sent = _bytes_of(text, device)
    size = torch.tensor([len(sent)], dtype=torch.int64, device=device)
    dist.broadcast(size, group_src=0, group=group)
    received = sent if group.rank() == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(received, group_src=0, group=group)
    return _text_of(received)


def gather_texts(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Return each rank's ``text``, in the order of the group's ranks: a collective call."""
    sent = _bytes_of(text, device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(sent)], dtype=torch.int64, device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(sent)] = sent
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [_text_of(piece[: int(size)]) for piece, size in zip(received, sizes, strict=True)]


def _bytes_of(text: str, device: torch.device) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)


def _text_of(received: Tensor) -> str:
    return bytes(received.tolist()).decode()
