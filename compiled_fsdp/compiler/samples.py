"""Measured times of collectives, to which curves are fitted, and the cache of measured hardware."""

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
"""Ending of the file beside a cached ``Hardware`` with the times that its curves are fitted to."""


@dataclass(frozen=True)
class Samples:
    """The measured times of one kind of collective in one group, by size. A curve is fitted to them.

    Attributes:
        kind: "gather", "reduce", "alltoall" or "all_reduce".
        ranks: the number of ranks of the group.
        nodes: the number of nodes that these ranks are on.
        sizes: bytes of the full tensors.
        seconds: for each size, the time of one more collective after others.
    """

    kind: str
    ranks: int
    nodes: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def residuals(self, curve: Curve) -> tuple[float, ...]:
        """Return how much longer than on ``curve`` each size took, as a share of the curve's time."""
        fitted = [curve.latency + size / curve.bytes_per_second for size in self.sizes]
        return tuple(took / expected - 1 for took, expected in zip(self.seconds, fitted, strict=True))


@dataclass(frozen=True)
class Measurement:
    """The result of ``measure_hardware``, and the times that it was made from.

    Attributes:
        hardware: the measured hardware, the same on every rank.
        samples: the first rank's times, to which the curves are fitted; empty if the cache has none.
        path: the file in the cache; None if the result is not cached, because something else was running.
    """

    hardware: Hardware
    samples: tuple[Samples, ...]
    path: Path | None


def samples_from_json(text: str) -> tuple[Samples, ...]:
    """Return the samples in a JSON list of dictionaries.

    Raises:
        Unfit: the text is something else (a ``ValueError``).
    """
    samples: tuple[Samples, ...] = from_json(tuple[Samples, ...], text)
    return samples


def cache_folder() -> Path:
    """Return the folder of measured hardware: FILE.json is a ``Hardware``, FILE.samples has its times."""
    return Path(os.environ.get("COMPILED_FSDP_CACHE_DIR") or Path.home() / ".cache" / "compiled_fsdp")


def keep(path: Path, hardware: str, samples: str) -> None:
    """Write a measurement into the cache, each file in one step, because a job that starts now may read it."""
    replace_text(path.with_suffix(SAMPLES), samples, READABLE)
    replace_text(path, hardware, READABLE)


def kept(path: Path) -> tuple[Hardware, tuple[Samples, ...]] | None:
    """Return the measurement in the cache; None if there is none, or, with a warning, if it is damaged."""
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
    """Return the files of measured hardware by names such as "measured-1a2b3c4d", the newest first."""
    files = sorted(cache_folder().glob("hardware-*.json"), key=lambda file: -file.stat().st_mtime)
    return {f"measured-{file.stem.removeprefix('hardware-')[:8]}": file for file in files}
