"""Write files that other processes may read meanwhile, and that no other user may write, whatever the umask is."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

READABLE = 0o644
"""File permissions: the owner writes, and all users read. The umask may take some of these permissions away."""
OURS = 0o600
"""File permissions: only the owner reads and writes."""
_FOLDER = {READABLE: 0o755, OURS: 0o700}


def replace_text(path: Path, text: str, rights: int) -> None:
    """Replace a file atomically: a reader sees either the old content or all of ``text``.

    Missing parent folders are created, with permissions that match ``rights``.

    Args:
        path: the file.
        text: the new content.
        rights: ``READABLE`` or ``OURS``; the umask may take some permissions away.
    """
    _make_folders(path.parent, _FOLDER[rights])
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        _write(unfinished, text, rights, os.O_EXCL)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in place to the file or pipe that the user named; all users may read a new file."""
    _write(path, text, READABLE, os.O_TRUNC)


def _write(path: Path, text: str, rights: int, how: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | how, rights), "w", encoding="utf-8") as file:
        file.write(text)


def _make_folders(folder: Path, rights: int) -> None:
    """Create the missing folders with permissions ``rights``.

    ``mkdir(parents=True)`` would create the parents with all permissions that the umask leaves.
    """
    for missing in reversed([parent for parent in (folder, *folder.parents) if not parent.exists()]):
        missing.mkdir(mode=rights, exist_ok=True)
