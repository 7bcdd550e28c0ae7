"""The torch versions that compiled_fsdp was tested with, and the warning and the errors for another one.

If torch is newer or older than all of them, or a nightly, this module looks up at once every private name that the
folder ``compat`` imports, and gives one warning. A function that needs a missing name raises an error when it is
called, which says which versions have the name. Everything else works.
"""

# Why: docs/design/torch.md, "Unknown versions of torch"

from __future__ import annotations

import ast
import functools
import importlib
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

OLDEST, NEWEST = (2, 11), (2, 15)
"""The oldest and the newest version that the test suite runs with. Versions between them count as tested."""


class Needed(NamedTuple):
    """An import of a private name of torch."""

    # The function or class of this folder that has the import.
    user: str
    module: str
    name: str


def version_of(text: str) -> tuple[int, int]:
    """Return the major and minor number of a version such as "2.13.0+cpu"; (0, 0) for another text."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def is_known(version: str) -> bool:
    """Whether compiled_fsdp was tested with a version of torch: from ``OLDEST`` to ``NEWEST``, and no pre-release."""
    is_release = re.fullmatch(r"[\d.]+(\+.*)?", version) is not None
    return is_release and OLDEST <= version_of(version) <= NEWEST


def check_version() -> None:
    """Warn if torch is none of the tested versions, and replace this folder's functions that need missing names.

    The replacement of a function or class raises an error. Whoever imports the name afterwards gets the replacement.
    """
    if is_known(torch.__version__):
        return
    folder = Path(__file__).parent
    missing: dict[str, list[str]] = defaultdict(list)
    for needed in needed_names(folder):
        if not is_there(needed):
            missing[needed.user].append(f"{needed.module}.{needed.name}")
    modules = [importlib.import_module(f"{__package__}.{p.stem}") for p in folder.glob("*.py") if p.stem != "__init__"]
    for user, names in missing.items():
        for module in modules:
            if hasattr(module, user):
                setattr(module, user, functools.partial(_fail, user, tuple(names)))
    lost = ", ".join(sorted({name for names in missing.values() for name in names}))
    warnings.warn(
        f"compiled_fsdp: this version was tested with {_versions()}, and not with torch {torch.__version__}."
        + (f" This torch has no {lost}, so features that need it raise an error." if lost else ""),
        stacklevel=2,
    )


def _versions() -> str:
    return f"torch {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"


def _fail(user: str, names: tuple[str, ...], *_: Any, **__: Any) -> NoReturn:
    raise ImportError(
        f"compiled_fsdp: torch {torch.__version__} has no {' and no '.join(names)}, which {user} needs. {_versions()} "
        "have it: install one of those, or a newer compiled_fsdp."
    )


def is_there(needed: Needed) -> bool:
    """Whether the installed torch has the name."""
    try:
        found = importlib.import_module(needed.module)
    except ImportError:
        return False
    if hasattr(found, needed.name):
        return True
    try:
        importlib.import_module(f"{needed.module}.{needed.name}")
    except ImportError:
        return False
    return True


def needed_names(folder: Path) -> Iterator[Needed]:
    """Yield the private names that a folder's functions and classes import.

    Imports whose ImportError is caught are left out, because the code can do without them.
    """
    for path in sorted(folder.glob("*.py")):
        for top in ast.parse(path.read_text()).body:
            if isinstance(top, (ast.FunctionDef, ast.ClassDef)):
                yield from _imports_in(top, top.name)


def _imports_in(node: ast.AST, user: str) -> Iterator[Needed]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Try) and any(_catches_import_errors(handler) for handler in child.handlers):
            continue
        if isinstance(child, ast.ImportFrom) and child.module and child.module.split(".")[0] == "torch":
            for alias in child.names:
                if re.search(r"(^|\.)_", f"{child.module}.{alias.name}"):
                    yield Needed(user, child.module, alias.name)
        yield from _imports_in(child, user)


def _catches_import_errors(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or "ImportError" in ast.unparse(handler.type)
