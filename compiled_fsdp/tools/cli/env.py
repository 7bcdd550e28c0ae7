"""``compiled-fsdp env``: print the facts about an installation that a bug report needs, and nothing private."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata

import click
import torch
import torch.distributed as dist

from compiled_fsdp.compat.patches import PATCHES, required_names
from compiled_fsdp.compat.versions import is_there
from compiled_fsdp.compiler.samples import cached, kept
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.cost.profiles import profile_of

LIBRARIES = ("triton", "numpy", "transformers", "accelerate", "lightning", "peft", "torchao", "torchtitan")
PREFIXES = ("COMPILED_FSDP_", "TORCH", "NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_")
"""Environment variables that begin with one of these are named."""
_SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL")
_PLAIN_VALUE = re.compile(r"[\w+,=-]*")  # no path, address or link


@click.command()
def env() -> None:
    """Say what is installed: versions, devices, hardware profiles, state of the patches. For bug reports."""
    for name, value in facts():
        click.echo(f"{name + ':':<18} {value}")


def facts() -> Iterator[tuple[str, str]]:
    """Yield the lines of the command's output: the name of a fact and its value, without host names or paths."""
    yield "compiled_fsdp", metadata.version("compiled_fsdp")
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, ROCm {torch.version.hip or 'none'}"
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "backends", ", ".join(name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name))
    yield "libraries", ", ".join(f"{name} {_version(name)}" for name in LIBRARIES)
    yield "CPU cores", str(os.cpu_count())
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in devices) or "none"
    if devices and dist.is_nccl_available():
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    for name in dict.fromkeys(gpu.name for gpu in devices):
        built_in = profile_of(name)
        yield "profile", f"{name}: " + ("unknown: call measure_hardware()" if built_in is None else built_in.name)
    measured = [found[0].name for file in cached().values() if (found := kept(file)) is not None]
    yield "measured profiles", ", ".join(measured) or f"none; {len(PROFILES)} are built in"
    problems = {patch.name: problem for patch in PATCHES if (problem := patch.problem())}
    yield "patches", "; ".join(f"{name} {problem}" for name, problem in problems.items()) or f"all {len(PATCHES)} fit"
    names = {f"{name.module}.{name.name}": is_there(name) for name in required_names()}
    missing = [name for name, there in names.items() if not there]
    yield "private names", f"missing: {', '.join(missing)}" if missing else f"all {len(names)} found"
    given = [name for name in sorted(os.environ) if name.startswith(PREFIXES) and not _SECRET.search(name)]
    yield "environment", ", ".join(f"{name}={_shown(os.environ[name])}" for name in given) or "none"


def _shown(value: str) -> str:
    return value if _PLAIN_VALUE.fullmatch(value) else "(set)"


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "missing"
