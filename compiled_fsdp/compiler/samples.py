"""What curves of collectives are fitted to, and where measured hardware is kept."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from compiled_fsdp.base.files import READABLE, replace_text
from compiled_fsdp.base.logs import warn_once
from compiled_fsdp.base.plain_data import from_json
from compiled_fsdp.passes.cost import Curve, Hardware

log = logging.getLogger(__name__)

SAMPLES = ".samples"
"""Ending of the file beside a cached ``Hardware`` that has what it was fitted to."""


@dataclass(frozen=True)
class Samples:
    """What one kind of collective took in one group, by size: what its curve is fitted to.

    Attributes:
        kind: "gather", "reduce", "alltoall" or "all_reduce".
        ranks: of the group.
        nodes: that they are on.
        sizes: bytes of the full tensors.
        seconds: of one more collective after others, at each size.
    """

    kind: str
    ranks: int
    nodes: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def residuals(self, curve: Curve) -> tuple[float, ...]:
        """How much longer than on ``curve`` each size took, as a share of the curve's time."""
        fitted = [curve.latency + size / curve.bytes_per_second for size in self.sizes]
        return tuple(took / expected - 1 for took, expected in zip(self.seconds, fitted, strict=True))


@dataclass(frozen=True)
class Measurement:
    """What ``measure_hardware`` has measured, and from what.

    Attributes:
        hardware: the same on every rank.
        samples: that its curves are fitted to, the first rank's; empty if there are none in the cache.
        path: where both are cached; None if they are not, because something else was running.
    """

    hardware: Hardware
    samples: tuple[Samples, ...]
    path: Path | None


def samples_from_json(text: str) -> tuple[Samples, ...]:
    """Samples of a list of dictionaries.

    Raises:
        Unfit: it is something else (a ``ValueError``).
    """
    samples: tuple[Samples, ...] = from_json(tuple[Samples, ...], text)
    return samples


def cache_folder() -> Path:
    """Where measured hardware is kept: FILE.json is a ``Hardware``, FILE.samples what it is fitted to."""
    return Path(os.environ.get("COMPILED_FSDP_CACHE_DIR") or Path.home() / ".cache" / "compiled_fsdp")


def keep(path: Path, hardware: str, samples: str) -> None:
    """Write a measurement into the cache, each file as a whole: a job that starts now may read it."""
    replace_text(path.with_suffix(SAMPLES), samples, READABLE)
    replace_text(path, hardware, READABLE)


def kept(path: Path) -> tuple[Hardware, tuple[Samples, ...]] | None:
    """The measurement in the cache; None if there is none, or, with a warning, if it is damaged."""
    samples = path.with_suffix(SAMPLES)
    try:
        hardware = Hardware.from_json(path.read_text())
        return hardware, samples_from_json(samples.read_text() if samples.exists() else "[]")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn_once(log, path, "measured hardware in %s is damaged, and is not used: %s", path, error)
        return None


def cached() -> dict[str, Path]:
    """The files of measured hardware, by names such as "measured-1a2b3c4d", the newest first."""
    files = sorted(cache_folder().glob("hardware-*.json"), key=lambda file: -file.stat().st_mtime)
    return {f"measured-{file.stem.removeprefix('hardware-')[:8]}": file for file in files}
