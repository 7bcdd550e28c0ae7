"""Files that other processes read while we write them, and that no other user may write, whatever the umask is."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

READABLE = 0o644
"""Rights of a file that others may read, as far as the umask lets them."""
OURS = 0o600
"""Rights of a file for its owner alone."""
_FOLDER = {READABLE: 0o755, OURS: 0o700}


def replace_text(path: Path, text: str, rights: int) -> None:
    """Write a file as a whole: who opens it finds what was there before, or all of ``text``.

    Folders that are missing are made, with the same rights.

    Args:
        path: the file.
        text: what it shall hold.
        rights: ``READABLE`` or ``OURS``; the umask may take some of them away.
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
    """Write what a user has asked for into a file of theirs (or a pipe), in place."""
    _write(path, text, READABLE, os.O_TRUNC)


def _write(path: Path, text: str, rights: int, how: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | how, rights), "w", encoding="utf-8") as file:
        file.write(text)


def _make_folders(folder: Path, rights: int) -> None:
    """Not ``mkdir(parents=True)``, which makes the parents with all rights that the umask leaves."""
    for missing in reversed([parent for parent in (folder, *folder.parents) if not parent.exists()]):
        missing.mkdir(mode=rights, exist_ok=True)
