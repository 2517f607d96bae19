"""What the embedded engine asks of a directory: local, private, and whose."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Final

from headwater.state.errors import InvalidLocation, StoreFull
from headwater.system.files import UnsafeDirectory, make_root

NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))

NETWORK_FILE_SYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "fuse.gcsfuse",
        "fuse.goofys",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "fuse.glusterfs",
        "gfs2",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
    ]
)


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds *path*; empty where the kernel does not tell."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return ""
    wanted = os.fspath(path.resolve())
    best, kind = -1, ""
    for line in mounts.splitlines():
        front, _, back = line.partition(" - ")
        point = front.split(" ")[4].encode().decode("unicode_escape")
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), back.split(" ")[0]
    return kind


def prepare_directory(path: Path) -> None:
    """Make *path* ready for a store: a private directory on a local file system.

    :raises InvalidLocation: not a directory, or on a network file system, where a mapped file is not safe.
    """
    try:
        make_root(path)
    except UnsafeDirectory:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidLocation(f"{path} is not a directory.") from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise full_disk(path) from error
        raise InvalidLocation(f"{path} cannot be made: {error}.") from error
    check_local(path)


def free_bytes(path: Path) -> int:
    """What can still be written to the disk of *path*, which need not exist."""
    while not path.exists():
        path = path.parent
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def _limit() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return "" if limit == resource.RLIM_INFINITY else f", and files are limited to {limit >> 20} MB (ulimit -f)"


def full_disk(path: Path) -> StoreFull:
    """The error of a store at *path* that could not be written for want of room."""
    return StoreFull(
        f"There is no room for {path}: {free_bytes(path) >> 20} MB are free on its disk{_limit()}.",
        next_step="Free some space.",
    )


def check_local(path: Path) -> None:
    """:raises InvalidLocation: *path* is on a network file system."""
    kind = file_system_of(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise InvalidLocation(
            f"{path} is on a network file system ({kind}); the embedded state store maps its file into memory and "
            "needs a local disk.",
            next_step="Choose a local directory, or the object-store engine (slatedb+s3://…).",
        )
