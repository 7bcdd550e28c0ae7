"""A corpus that every machine has: the source files of Python's standard library, as bytes."""

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

# Installed packages, test suites, and tables that are data rather than code.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
HELD_BACK_ONE_IN = 16


def load() -> tuple[Tensor, Tensor]:
    """The training bytes and the held-back bytes, each a uint8 tensor [N].

    Files are taken in sorted order, and a hash of a file's relative name decides whether it is held back. So the split
    depends neither on the file system nor on the place where Python is installed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train, held_back = bytearray(), bytearray()
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in names:
        if SKIPPED.isdisjoint(name.split("/")):
            part = train if zlib.crc32(name.encode()) % HELD_BACK_ONE_IN else held_back
            part += (root / name).read_bytes() + b"\n"
    if not train or not held_back:
        raise FileNotFoundError(f"no Python sources under {root}: is the standard library installed as .py files?")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_back, dtype=torch.uint8)


def unigram_entropy(data: Tensor) -> float:
    """Nats per byte of the best model of `data` that sees no context: it knows only how often each byte occurs."""
    counts = torch.bincount(data.long(), minlength=256).double()
    return torch.special.entr(counts / counts.sum()).sum().item()


def windows(data: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut a window at each start [B]: the bytes [B, length] and the byte after each [B, length], as int64."""
    cut = data[starts[:, None] + torch.arange(length + 1)].long()
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def random_starts(data: Tensor, batch: int, length: int, seed: int, step: int) -> Tensor:
    """Random window starts [batch] for one training step. The same seed and step give the same starts."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(len(data) - length, (batch,), generator=generator)


def even_starts(data: Tensor, count: int, length: int) -> Tensor:
    """`count` window starts spread evenly over `data`, [count]."""
    return torch.linspace(0, len(data) - length - 1, count, dtype=torch.float64).long()
