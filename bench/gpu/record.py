"""Records of measurements, and of the machine on which they were made."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass
class Record:
    """One measurement.

    Attributes:
        bench: the measurement's name.
        system: the system that was measured.
        bytes: the bytes that one call reads and writes on the device; None if the measurement is not about bytes.
        tensors: the number of tensors in a bucket, or of parameters in a model.
        seconds: the median time.
        gbps: the rate, in 10**9 bytes a second.
        ratio_to_copy: ``gbps`` as a share of the rate of a device-to-device copy of as many bytes.
        more: other values by name. The name has the value's unit.
    """

    bench: str
    system: str
    bytes: int | None = None
    tensors: int | None = None
    seconds: float | None = None
    gbps: float | None = None
    ratio_to_copy: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return one flat JSON object with all values."""
        values = asdict(self)
        return {**{key: value for key, value in values.items() if key != "more"}, **values["more"]}

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f"{1e3 * self.seconds:9.4f} ms"
        rate = "" if self.gbps is None else f"{self.gbps:9.1f} GB/s"
        ratio = "" if self.ratio_to_copy is None else f"{self.ratio_to_copy:5.2f} of a copy"
        size = "" if self.bytes is None else f"{self.bytes / 1e6:9.2f} MB"
        count = "" if self.tensors is None else f"{self.tensors:4} tensors"
        more = ", ".join(f"{key} {_short(value)}" for key, value in self.more.items())
        return f"{self.bench:24} {self.system:34} {size} {count} {seconds} {rate} {ratio} {more}".rstrip()


def _short(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return " .. ".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine(device: torch.device) -> Record:
    """Return the record of this machine: names and versions."""
    more: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "triton": _triton()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        more |= {"gpu": properties.name, "gpus": torch.cuda.device_count(), "memory_bytes": properties.total_memory}
        more |= {"cuda": torch.version.cuda, "driver": _driver(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    else:
        more |= {"cpu": platform.processor() or platform.machine()}
    return Record("machine", str(device.type), more=more)


def not_measured(bench: str, why: str) -> Record:
    """Return the record of a measurement that this machine cannot make, with the reason."""
    return Record(bench, "not measured", more={"why": why})


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown: nvidia-smi did not tell"
