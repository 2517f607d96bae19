"""What the embedded engine asks of a directory: local, private, and whose."""

from __future__ import annotations

import os
from pathlib import Path

from headwater.state.errors import InvalidLocation

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
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidLocation(f"{path} is not a directory.") from error
    except (OSError, ValueError) as error:
        raise InvalidLocation(f"{path} cannot be made: {error}.") from error
    check_local(path)


def check_local(path: Path) -> None:
    """:raises InvalidLocation: *path* is on a network file system."""
    kind = file_system_of(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise InvalidLocation(
            f"{path} is on a network file system ({kind}); the embedded state store maps its file into memory and "
            "needs a local disk.",
            next_step="Choose a local directory, or the object-store engine (slatedb+s3://…).",
        )
