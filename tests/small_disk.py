"""A small disk that a test fills and empties: a tmpfs in a mount namespace of its own, so that nothing outside sees it.

It needs no root, only the right to create namespaces (``unshare``), which some containers do not have: a test that
needs one is skipped there, with the reason. Processes enter it through :meth:`SmallDisk.command`; the test itself sees
its files at :attr:`SmallDisk.view`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_MOUNT: Final = 'mount -t tmpfs -o size="$2",mode=700 tmpfs "$1" && echo mounted && exec cat'
_BLOCK: Final = 1 << 16


class SmallDisk:
    """One disk. :ivar path: where the processes inside see it. :ivar view: where all others do."""

    def __init__(self, path: Path, holder: int) -> None:
        self.path = path
        self.view = Path(f"/proc/{holder}/root{path}")
        self._enter = ["nsenter", "--mount", f"--target={holder}"]
        if os.geteuid() != 0:
            self._enter += ["--user", "--preserve-credentials"]
        self._ballast = self.view / "ballast"

    def command(self, *arguments: str, folder: Path | None = None) -> list[str]:
        """*arguments* as a command of a process that has the disk, in the directory *folder*."""
        return [*self._enter, "--", "sh", "-c", 'cd "$0" && exec "$@"', str(folder or self.path), *arguments]

    @property
    def free_bytes(self) -> int:
        disk = os.statvfs(self.view)
        return disk.f_bavail * disk.f_frsize

    def fill(self) -> None:
        """Take all the room that is left."""
        block = os.urandom(_BLOCK)
        with self._ballast.open("ab", buffering=0) as file:
            while block:
                try:
                    whole = file.write(block) == len(block)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    whole = False
                if not whole:
                    block = block[: len(block) // 2]

    def make_room(self) -> None:
        """Give back what :meth:`fill` took."""
        self._ballast.unlink()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    """A disk of *size*, as ``mount`` spells it, at *folder*; it is gone when the test ends, however it ends."""
    folder.mkdir()
    unshare = ["unshare", "--mount", "--propagation=private"]
    if os.geteuid() != 0:
        unshare += ["--user", "--map-root-user"]
    with subprocess.Popen(
        [*unshare, "sh", "-c", _MOUNT, "sh", str(folder), size],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            if holder.stdout.readline() != "mounted\n":
                pytest.skip(f"no disk of its own can be mounted here: {holder.stderr.read().strip()}")
            yield SmallDisk(folder, holder.pid)
        finally:
            holder.stdin.close()
