"""What can go wrong with a journal, each error under a category of :mod:`headwater.errors`.

The category says what the caller must do; the class and its fields say what happened. No error
holds the content of an entry.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.errors import (
    CapacityError,
    ClosedError,
    ConflictError,
    CorruptionError,
    HeadwaterError,
    InputError,
    NotFoundError,
    TransientError,
)

if TYPE_CHECKING:
    from headwater.journal.entry import Head


class JournalError(HeadwaterError):
    """Base of all errors of this package."""


class StoreIoError(JournalError):
    """The operating system refused: `operation` on `path` failed with `errno`."""

    advice: str | None = None

    def __init__(self, operation: str, path: str | Path, cause: OSError) -> None:
        self.operation, self.path, self.errno = operation, str(path), cause.errno
        reason = os.strerror(cause.errno) if cause.errno else str(cause)
        super().__init__(f"Cannot {operation} {path}: {reason}.", next_step=self.advice)


class NoRoomError(StoreIoError, CapacityError):
    """Disk, quota or file size limit is full. The log is as it was before the call."""

    advice = "Free some space and call again."


class AccessDeniedError(StoreIoError, InputError):
    """Permissions or a read-only file system forbid it."""

    advice = "Check the owner and mode of the path."


class NotARegularFileError(StoreIoError, InputError):
    """A symbolic link, directory or device stands where a log file should be."""

    advice = "Move it out of the journal."


class SyncFailedError(StoreIoError, ClosedError):
    """The disk did not confirm a write. Whether the entry survives a power loss is unknown.

    Never retried: after a failed sync the kernel may have dropped the bytes and report success next time.

    :ivar is_reported: it was raised; `close` raises one that was not.
    """

    advice = "Check the disk, open the store again and compare the head before you go on."
    is_reported = False


class BusyError(JournalError, TransientError):
    """Another process was at work in the segment for too long, or changed it in between. Call again."""


class InvalidEntryError(JournalError, InputError):
    """The entry uses a reserved name, an empty kind or an impossible time, or is not JSON. Nothing was written."""


class EntryTooLargeError(JournalError, CapacityError):
    """The entry or batch is above the size limit. Nothing was written."""


class InvalidNameError(JournalError, InputError):
    """A session or segment name is not spelled in the one accepted way."""


class SegmentNotFoundError(JournalError, NotFoundError):
    """There is no such segment."""

    def __init__(self, session: str, segment: str, *, message: str | None = None) -> None:
        super().__init__(
            message or f"Session {session} has no segment {segment}.",
            next_step="Run `headwater journal list` to see what exists.",
        )


class SegmentDeletedError(SegmentNotFoundError):
    """The segment (or its session) was deleted, and stays deleted."""

    def __init__(self, session: str, segment: str) -> None:
        super().__init__(session, segment, message=f"Segment {segment} of session {session} was deleted.")


class BoundaryNotFoundError(JournalError, NotFoundError):
    """The segment has no entry with this seq. :ivar current: its head, where it is known."""

    def __init__(self, segment: str, seq: int, current: Head | None = None) -> None:
        self.current = current
        known = "" if current is None else f"; its newest is {current.seq}"
        super().__init__(
            f"Segment {segment} has no entry {seq}{known}.",
            next_step=f"Run `headwater journal show {segment}` to see its entries.",
        )


class CorruptError(JournalError, CorruptionError):
    """Stored bytes are not what was written.

    :ivar path: of the segment. :ivar line: physical line, counted from 1. :ivar offset: byte offset of that line.
    :ivar seq: the seq that should stand there.
    """

    def __init__(self, path: str, line: int, offset: int, seq: int, reason: str) -> None:
        self.path, self.line, self.offset, self.seq, self.reason = path, line, offset, seq, reason
        name = Path(path).name.removesuffix(".jsonl").rpartition("#")[2]
        super().__init__(
            f"{path}, line {line} (byte {offset}, entry {seq}): {reason}.",
            next_step=f"Run `headwater journal verify {name}`, then `headwater journal repair {name}`.",
        )


class UnsupportedVersionError(JournalError, InputError):
    """The line was written by a newer version of the format."""

    def __init__(self, path: str, offset: int, version: str) -> None:
        super().__init__(
            f"{path}, byte {offset}: written in format version {version}; this program reads version 1.",
            next_step="Upgrade headwater.",
        )


class HeadConflictError(JournalError, ConflictError):
    """The head is not the expected one: another writer was faster. Nothing was written."""

    def __init__(self, segment: str, expected: Head, current: Head) -> None:
        self.expected, self.current = expected, current
        super().__init__(
            f"Segment {segment} is at {current}, expected {expected}.",
            next_step="Read what was added, then append with the current head, or fork.",
        )


class SegmentCutError(JournalError, ConflictError):
    """The segment was truncated below the reader's position."""

    def __init__(self, segment: str, seq: int) -> None:
        super().__init__(
            f"Segment {segment} was truncated below entry {seq} while it was read.",
            next_step="Read it again from the start.",
        )


class AlreadyExistsError(JournalError, ConflictError):
    """The segment to create exists. Nothing was written."""


class StoreClosedError(JournalError, ClosedError):
    """The store was closed before."""


_CLASSES: dict[int, type[StoreIoError]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), NoRoomError),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), AccessDeniedError),
    **dict.fromkeys((errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO), NotARegularFileError),
}


def io_error(operation: str, path: str | Path, cause: OSError) -> StoreIoError:
    """*cause* as the error of this package that says what to do."""
    return _CLASSES.get(cause.errno or 0, StoreIoError)(operation, path, cause)


@contextmanager
def io_errors(operation: str, path: str | Path) -> Iterator[None]:
    """Raise an `OSError` of the block as :func:`io_error`. An append, which this would slow down, does it by hand."""
    try:
        yield
    except OSError as error:
        raise io_error(operation, path, error) from error
