"""Which versions of torch this package knows, and what is said under another one.

Under a version that is newer than all of them, a nightly of a known one included, every private name that this folder
imports is looked up at once. There is one warning. What needs a name that is not there is an error when it is called,
which says who has the name; the rest works.
"""

# Why: docs/design.md, note N72

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
"""The versions with which the suite is run, and those between them."""


class Needed(NamedTuple):
    """An import of a private name."""

    # Of the function or class of this folder that has it.
    user: str
    module: str
    name: str


def is_known(version: str) -> bool:
    """Whether a version of torch is one that this package was tested with: no newer one, and no nightly."""
    found = re.match(r"(\d+)\.(\d+)[.\d]*(.*)", version)
    return found is not None and (int(found[1]), int(found[2])) <= NEWEST and not re.match(r"\.?(a|b|rc|dev)", found[3])


def check_version() -> None:
    """Warn if torch is newer than those that are known, and put errors in the place of this folder's names that need
    what it does not have. Whoever imports such a name afterwards gets the error.
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
        f"compiled_fsdp: torch {torch.__version__} is newer than {_versions()}, with which this version of "
        f"compiled_fsdp was tested." + (f" It has no {lost}: what needs that is an error." if lost else ""),
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
    """The private names that a folder's functions and classes import, without those that they can do without."""
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
