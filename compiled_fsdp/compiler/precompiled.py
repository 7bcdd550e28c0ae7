"""Code that ``compiled-fsdp precompile`` has compiled, in one file that training processes load.

The file is a zip archive: a manifest, and the files of Inductor's cache folder. Loading puts these into the folder of
this process, and the compile finds them there as it would find its own.
"""

# Why: docs/design/ranks.md, "Precompiled code is a folder of cached code"

from __future__ import annotations

import functools
import hashlib
import logging
import lzma
import os
import platform
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from compiled_fsdp.base.files import OURS, replace_bytes
from compiled_fsdp.base.logs import warn_once
from compiled_fsdp.base.plain_data import PlainData, Unfit
from compiled_fsdp.compat.code_cache import code_caches_are_on
from compiled_fsdp.compiler.cached_code import BUILD, CachedCode, checked_cache_folder, no_writing
from compiled_fsdp.compiler.hardware import device_name, ranks_on_this_machine
from compiled_fsdp.ranks.question import Signature

log = logging.getLogger(__name__)

_MANIFEST, _FILES = "manifest.json", "cache/"
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError, KeyError, Unfit, EOFError, UnicodeDecodeError)
PRECOMPILING = "COMPILED_FSDP_PRECOMPILING"
"""The environment variable that is set while ``compiled-fsdp precompile`` runs a script: then nothing is loaded."""


@dataclass(frozen=True)
class _Manifest(PlainData):
    """What code was compiled for.

    Attributes:
        facts: what must be the same in the process that loads it, by name.
        ranks: the ranks that the code was compiled for.
        signatures: of each compile, the facts about its options and parameters (``Compilation.signature``).
    """

    facts: dict[str, str]
    ranks: tuple[int, ...]
    signatures: tuple[tuple[str, ...], ...]


_loaded: dict[str, _Manifest] = {}  # the files that this process has loaded


def load_precompiled(path: str | os.PathLike[str]) -> bool:
    """Load code that ``compiled-fsdp precompile`` has compiled, so that this process need not compile it.

    Call it on every rank, after ``init_process_group`` and before the first step::

        compiled_fsdp.load_precompiled("train.precompiled")
        model = torch.compile(model, backend="compiled_fsdp")

    If the file was made for other versions, devices or ranks, a warning names the difference, and the model is compiled
    as without the file. So it is if a graph is not in the file, for example of another model.

    The file has code that will run in this process, like a program: load it only if you trust whoever could write it.

    Args:
        path: the file. It is unpacked into Inductor's cache folder (``TORCHINDUCTOR_CACHE_DIR``).

    Returns:
        Whether the code was loaded. In a script that ``compiled-fsdp precompile`` runs it never is.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or something else, or other users can write to the cache folder.
        OSError: the file cannot be read, or the cache folder cannot be written.
    """
    path = Path(path)
    if PRECOMPILING in os.environ:
        return False
    if not code_caches_are_on():
        log.warning("%s was not loaded, because torch's caches of compiled code are off in this process", path)
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = _Manifest.from_json(archive.read(_MANIFEST).decode())
            names = [name for name in archive.namelist() if name.startswith(_FILES) and not name.endswith("/")]
            outside = any(".." in Path(name).parts or name.startswith(f"{_FILES}/") for name in names)
            if outside or archive.testzip() is not None:
                raise zipfile.BadZipFile("a file in it is not as it was written")
            if different := _differences(manifest.facts, facts_here()):
                log.warning(
                    "%s was not loaded, and the model will be compiled: it was made for another %s",
                    path,
                    "; ".join(different),
                )
                return False
            _unpack(archive, names)
    except _DAMAGED as error:
        raise ValueError(
            f"load_precompiled: {path} is damaged, or was not written by this version of compiled-fsdp precompile "
            f"({error}). Write it again."
        ) from error
    _loaded[str(path)] = manifest
    return True


def save_precompiled(path: Path, folder: Path, facts: dict[str, str], ranks: Sequence[int]) -> int:
    """Write what is in a cache folder to a file for ``load_precompiled``; no file, if the folder has no compiled code.

    Args:
        path: the file.
        folder: a cache folder with the code of this job and nothing else.
        facts: what ``facts_here`` returned in the process that compiled.
        ranks: the ranks that the code was compiled for.

    Returns:
        The number of compiles of which the folder has code.
    """
    signatures = sorted(compiled.plan.signature for compiled in CachedCode.all_in(folder))
    if not signatures:
        return 0
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_MANIFEST, _Manifest(facts, tuple(ranks), tuple(signatures)).to_json())
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.suffix != ".lock":
                    archive.write(file, _FILES + str(file.relative_to(folder)))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(signatures)


def facts_here() -> dict[str, str]:
    """Return what code depends on and a graph does not show: versions, devices, and the number of ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    here = ranks_on_this_machine()
    return {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "compiled_fsdp": BUILD[-1],
        "device": device_name("cuda"),
        "processor": _processor(),  # C++ code is compiled for the one that it runs on
        "number of ranks": str(ranks),
        "LOCAL_WORLD_SIZE": "not set" if here is None else str(here),
    }


def warn_of_missing_code(signature: Signature, *, found: bool, may_be_cached: bool) -> None:
    """Log one warning if a file was loaded but a graph is compiled, and say why.

    Args:
        signature: the graph's.
        found: whether this rank has code for it, and another rank has not.
        may_be_cached: whether the cache can have code for it.
    """
    if not _loaded:
        return
    ranks = ", ".join(str(rank) for rank in sorted({rank for of in _loaded.values() for rank in of.ranks}))
    if found:
        why = f"another rank has no code for it, and the code is that of rank {ranks}"
    elif may_be_cached:
        why = _why_missing(signature, [one for of in _loaded.values() for one in of.signatures], ranks)
    else:
        why = "no cache keeps such code (CUDA graphs, compiled autograd)"
    text = "a graph is compiled although %s was loaded: %s. compiled-fsdp precompile writes the file anew"
    warn_once(log, "not precompiled", text, ", ".join(_loaded), why)


def _why_missing(signature: Signature, known: Sequence[Signature], ranks: str) -> str:
    if signature in known:
        return (
            "the code of the model or of its loss, the shapes of its inputs, the number of threads or another setting "
            f"of torch differs; or the code depends on the rank, and that in the file is of rank {ranks}"
        )
    lines = _lines(signature)
    closest = max(known, key=lambda other: len(set(lines) & set(_lines(other))))
    here, there = (sorted(set(a) - set(b)) for a, b in ((lines, _lines(closest)), (_lines(closest), lines)))
    return f"here {'; '.join(here[:3]) or 'nothing more'}; in the file {'; '.join(there[:3]) or 'nothing more'}"


def _lines(signature: Signature) -> list[str]:
    return [line for part in signature for line in part.splitlines()]


def _differences(there: dict[str, str], here: dict[str, str]) -> list[str]:
    return [f"{name} ({there.get(name)}, here {value})" for name, value in here.items() if there.get(name) != value]


def _unpack(archive: zipfile.ZipFile, names: Sequence[str]) -> None:
    """Write files into the cache folder, unless they are there.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = checked_cache_folder()
    try:
        for name in names:
            target = folder / name.removeprefix(_FILES)
            if not target.exists():
                replace_bytes(target, archive.read(name), OURS)
    except OSError as error:
        raise OSError(no_writing(error)) from error


@functools.cache
def _processor() -> str:
    """Return the processor's name for what its code may use, with a hash of all its features where Linux lists them."""
    name = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{name}, features {hashlib.sha256(features.encode()).hexdigest()[:8]}"
