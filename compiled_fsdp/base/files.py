"""Write files that other processes may read meanwhile, and that no other user may write, whatever the umask is."""

from __future__ import annotations

import functools
import os
import stat
import uuid
from pathlib import Path

READABLE = 0o644
"""File permissions: the owner writes, and all users read. The umask may take some of these permissions away."""
OURS = 0o600
"""File permissions: only the owner reads and writes."""
_FOLDER = {READABLE: 0o755, OURS: 0o700}


def replace_text(path: Path, text: str, rights: int) -> None:
    """Replace a file atomically, as ``replace_bytes`` does."""
    replace_bytes(path, text.encode(), rights)


def replace_bytes(path: Path, content: bytes, rights: int) -> None:
    """Replace a file atomically: a reader sees either the old content or all of the new.

    Missing parent folders are created, with permissions that match ``rights``.

    Args:
        path: the file.
        content: the new content.
        rights: ``READABLE`` or ``OURS``; the umask may take some permissions away.
    """
    make_folders(path.parent, _FOLDER[rights])
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        _write(unfinished, content, rights, os.O_EXCL)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in place to the file or pipe that the user named; all users may read a new file."""
    _write(path, text.encode(), READABLE, os.O_TRUNC)


def check_folder_is_ours(folder: Path) -> None:
    """Raise ValueError if somebody else could put files into a folder of code that will run, or into its folders.

    A missing folder is made, for this user alone. Fine is a folder of this user or of root that no other user may write
    to. The folders in it count only if others may enter it. A group that has this user's name does not count as others:
    many systems give each user one, and permissions for it.
    """
    make_folders(folder, _FOLDER[OURS])
    others_enter = folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH)
    for path in (folder, *(each for each in folder.iterdir() if others_enter and each.is_dir())):
        try:
            about = path.stat()
        except FileNotFoundError:  # another process has removed it
            continue
        if about.st_uid not in (os.getuid(), 0):
            raise ValueError(
                f"compiled_fsdp: {path} belongs to another user, and has code that this process would run. Set "
                "TORCHINDUCTOR_CACHE_DIR to a folder of your own."
            )
        everyone = about.st_mode & stat.S_IWOTH
        if everyone or (about.st_mode & stat.S_IWGRP and not _is_own_group(about.st_gid)):
            raise ValueError(
                f"compiled_fsdp: {'every user' if everyone else 'a group'} can write to {path}, which has code that "
                "this process would run. Set TORCHINDUCTOR_CACHE_DIR to a folder of your own, or let nobody else in: "
                f"chmod 700 {folder}"
            )


@functools.cache
def _is_own_group(group: int) -> bool:
    import grp  # not on every system
    import pwd

    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may have numbers without names
        return group == os.getuid()


def _write(path: Path, content: bytes, rights: int, how: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | how, rights), "wb") as file:
        file.write(content)


def make_folders(folder: Path, rights: int) -> None:
    """Create the missing folders with permissions ``rights``.

    ``mkdir(parents=True)`` would create the parents with all permissions that the umask leaves.
    """
    for missing in reversed([parent for parent in (folder, *folder.parents) if not parent.exists()]):
        missing.mkdir(mode=rights, exist_ok=True)
