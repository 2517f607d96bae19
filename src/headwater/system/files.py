"""Directories and files that only their owner can read: 0700 and 0600, whatever the umask.

All that Headwater keeps for itself (stores, work and staging directories, spilled transactions, logs, dead letters) is
created here. Target tables are not: their readers are other users, and the umask decides.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from headwater.errors import InputError

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
_PARENT_MODE: Final = 0o755
_OTHERS: Final = 0o077


class UnsafeDirectory(InputError):
    """Another user can write a directory whose content is trusted."""


def make_root(directory: Path) -> None:
    """As :func:`make_private`; a directory that another user can write is refused.

    :raises OSError: it cannot be created, or the name is taken by a file. :raises UnsafeDirectory: see there.
    """
    make_private(directory)
    check_private(directory)


def make_private(directory: Path) -> None:
    """Create *directory*. An existing one keeps its mode.

    Missing parents are private inside a private directory. Elsewhere other users can pass through them, as target
    tables can be beside *directory*, but not write.

    :raises OSError: it cannot be created, or the name is taken by a file.
    """
    if not directory.is_dir():
        _make_parent(directory.parent)
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)


def _make_parent(directory: Path) -> None:
    if not directory.exists():
        _make_parent(directory.parent)
        around = directory.parent.stat().st_mode
        directory.mkdir(_PARENT_MODE if around & _OTHERS else DIRECTORY_MODE, exist_ok=True)


def open_private(path: Path, mode: str = "w", **options: Any) -> IO[Any]:
    """As the built-in ``open``; a file that it creates is private."""
    return open(path, mode, opener=_create, **options)


def _create(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


def replace_file(path: Path, text: str, *, durable: bool = False) -> None:
    """Write *path* so that a reader sees the old text or the new one. A new file is private; an old one keeps its mode.

    :param durable: it survives a power failure.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open_private(draft, encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            shutil.copymode(path, draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Make the file *path*, or the names in the directory *path*, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_private(directory: Path) -> None:
    """Refuse a directory that another user can write; one that does not exist passes.

    Root is no other user: it can write everything.

    :raises UnsafeDirectory: with the command that makes it safe.
    """
    try:
        found = directory.stat()
    except OSError:
        return
    name = directory.absolute()
    if found.st_uid not in (os.geteuid(), 0):
        raise UnsafeDirectory(
            f"{name} belongs to another user (uid {found.st_uid}), who can change what is stored in it.",
            next_step=f"Run: chown -R {os.geteuid()} {name} && chmod 700 {name}",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeDirectory(
            f"Other users can write to {name} (mode {stat.S_IMODE(found.st_mode):04o}), "
            "so they can change what is stored in it.",
            next_step=f"Run: chmod 700 {name}",
        )
