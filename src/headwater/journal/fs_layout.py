"""Names below the root of an `FsStore`, and the durable steps on names: create, tombstone, sweep."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater import failpoints
from headwater.journal import files, locks
from headwater.journal.errors import BusyError, NotARegularFileError, SegmentDeletedError, io_error
from headwater.journal.ids import check_id, is_id, new_id

CREATE_WRITTEN = failpoints.register("journal.fs.create.after_write")
CREATE_LINKED = failpoints.register("journal.fs.create.after_link")
CREATE_UNLINKED = failpoints.register("journal.fs.create.after_unlink")
CREATE_SYNCED = failpoints.register("journal.fs.create.after_directory_sync")

_LOG = ".jsonl"
_STALE_SECONDS = 60.0


class Layout:
    """Paths and names; see the docstring of :mod:`headwater.journal.fs`."""

    def __init__(self, root: Path, lock_timeout: float) -> None:
        self._root = root
        self._timeout = lock_timeout

    def log(self, session: str, segment: str) -> Path:
        """The log's path.

        :raises InvalidNameError: an id is not canonical.
        """
        return self._root / check_id(session, "session") / f"{check_id(segment, 'segment')}{_LOG}"

    def side(self, log: Path, label: str) -> Path:
        """A new name for bytes taken off *log*."""
        return log.with_name(f"{log.stem}.{label}.{new_id()[-12:]}.saved")

    def temporary(self, log: Path) -> Path:
        """A new name for a creation in progress."""
        return log.with_name(f".{log.stem}.{os.getpid()}-{secrets.token_hex(6)}.tmp")

    # ---- what exists ---------------------------------------------------------------------------

    def is_regular(self, path: Path) -> bool:
        """Is there a file?

        :raises NotARegularFileError: there is something else.
        :raises AccessDeniedError: it cannot be known.
        """
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise io_error("look at", path, error) from error
        if not stat.S_ISREG(mode):
            raise NotARegularFileError("use", str(path), OSError("not a regular file"))
        return True

    def _names(self, directory: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(directory) as found:
                return list(found)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise io_error("list", directory, error) from error

    def session_ids(self) -> list[str]:
        """Directories with a canonical name that hold a log."""
        return [
            found.name
            for found in self._names(self._root)
            if is_id(found.name) and found.is_dir(follow_symlinks=False) and self.segment_ids(found.name)
        ]

    def segment_ids(self, session: str) -> list[str]:
        """Regular files named canonical id + `.jsonl`."""
        return [
            found.name.removesuffix(_LOG)
            for found in self._names(self._root / check_id(session, "session"))
            if found.name.endswith(_LOG) and is_id(found.name[: -len(_LOG)]) and found.is_file(follow_symlinks=False)
        ]

    # ---- creation ------------------------------------------------------------------------------

    @contextmanager
    def session_lock(self, session: str, segment: str) -> Iterator[None]:
        """Keep a deletion of the session away while a segment is created in it.

        :raises SegmentDeletedError: the session or the segment was deleted.
        """
        directory = self._root / session
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise SegmentDeletedError(session, segment) from None
        except OSError as error:
            raise io_error("open the directory", directory, error) from error
        try:
            locks.take(fd, locks.SHARED, directory, self._timeout)
            if self.is_deleted(session, segment) or os.fstat(fd).st_nlink == 0:
                raise SegmentDeletedError(session, segment)
            yield
        finally:
            os.close(fd)

    def create(self, path: Path, lines: Iterable[bytes]) -> None:
        """A durable log at *path* with *lines*: there whole, or not there.

        :raises FileExistsError: the name is taken.
        """
        self.sweep(path.parent)
        temporary = self.temporary(path)
        files.write_new(temporary, lines)
        try:
            failpoints.hit(CREATE_WRITTEN)
            os.link(temporary, path, follow_symlinks=False)
            failpoints.hit(CREATE_LINKED)
        except FileExistsError:
            raise
        except FileNotFoundError:  # swept: by a deletion or replacement of the segment, or because it took too long
            if self.is_regular(path):
                raise FileExistsError(path) from None
            self._refuse_deleted(path)
            raise BusyError(
                f"The creation of {path} took so long that it was swept away as stale.",
                next_step="Call again.",
            ) from None
        except OSError as error:
            raise io_error("create", path, error) from error
        finally:
            temporary.unlink(missing_ok=True)
        failpoints.hit(CREATE_UNLINKED)
        self._refuse_deleted(path)
        files.sync_directory(path.parent)
        failpoints.hit(CREATE_SYNCED)

    def _refuse_deleted(self, path: Path) -> None:
        """A deletion of an older log of this name passed while the new one was made: its tombstone counts."""
        session, segment = path.parent.name, path.stem
        if self.is_deleted(session, segment):
            path.unlink(missing_ok=True)
            raise SegmentDeletedError(session, segment)

    def sweep(self, directory: Path, segment: str = "", *, min_age: float = _STALE_SECONDS) -> None:
        """Remove what crashed creations left behind: temporary names older than *min_age* seconds."""
        for found in self._names(directory):
            if found.name.startswith(f".{segment}") and found.name.endswith(".tmp"):
                try:
                    if time.time() - found.stat(follow_symlinks=False).st_mtime >= min_age:
                        Path(found.path).unlink(missing_ok=True)
                except OSError:
                    continue

    # ---- deletion ------------------------------------------------------------------------------

    def _tombstone(self, session: str, segment: str) -> Path:
        return self._root / session / f"{segment}.deleted"

    def _session_tombstone(self, session: str) -> Path:
        return self._root / f"{session}.deleted"

    def is_deleted(self, session: str, segment: str) -> bool:
        """Is there a tombstone of the segment or of its session?"""
        return files.present(self._tombstone(session, segment)) or files.present(self._session_tombstone(session))

    def _mark(self, path: Path) -> None:
        """An empty file: a full disk has room for its name, and its time says when."""
        try:
            files.write_new(path, [])
        except FileExistsError:
            pass
        files.sync_directory(path.parent)

    def mark_deleted(self, session: str, segment: str) -> None:
        """Write the segment's tombstone, durably."""
        self._mark(self._tombstone(session, segment))

    def mark_session_deleted(self, session: str) -> None:
        """Write the session's tombstone, durably: from here on nothing can be created in it."""
        self._mark(self._session_tombstone(session))

    def is_half_deleted(self, session: str) -> bool:
        """Did a deletion of the session crash before its directory was gone?"""
        return files.present(self._session_tombstone(session)) and files.present(self._root / session)

    def remove_sides(self, log: Path) -> None:
        """Remove the saved bytes of a deleted log."""
        for found in self._names(log.parent):
            if found.name.startswith(f"{log.stem}.") and found.name.endswith(".saved"):
                Path(found.path).unlink(missing_ok=True)

    @contextmanager
    def emptying(self, session: str) -> Iterator[None]:
        """Keep creations away from a session while its logs are deleted; with a tombstone, remove what is left."""
        directory = self._root / session
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # another process was faster
            yield
            return
        except OSError as error:
            raise io_error("open the directory", directory, error) from error
        try:
            locks.take(fd, locks.EXCLUSIVE, directory, self._timeout)
            yield
            if self.is_half_deleted(session):
                shutil.rmtree(directory)
                files.sync_directory(self._root)
        except OSError as error:
            raise io_error("delete", directory, error) from error
        finally:
            os.close(fd)
