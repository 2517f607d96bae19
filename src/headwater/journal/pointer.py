"""Names for what is current: a small record per name, apart from the logs, that says which segment is active.

The log says what happened, the pointer what counts now. A record names a session and, once it exists, a segment, and
carries labels of its user. Written whole and durably (temporary name, sync, rename), changed under a lock.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater import failpoints
from headwater.journal import files, locks
from headwater.journal.errors import CorruptError, InvalidNameError, SerialisationError, io_error
from headwater.journal.ids import check_id, is_id
from headwater.private_files import FILE_MODE

WRITTEN = failpoints.register("journal.pointer.after_write")
RENAMED = failpoints.register("journal.pointer.after_rename")
_LOCK_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Pointer:
    """`segment` is None while the session is reserved but nothing was written."""

    session: str
    segment: str | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)


def check_name(name: str) -> str:
    """*name* itself.

    :raises InvalidNameError: it cannot be a file's name.
    """
    given: object = name
    if (
        not isinstance(given, str)
        or not given
        or given.startswith(".")
        or not {"/", "\0"}.isdisjoint(given)
        or len(given.encode(errors="replace")) > 200
        or not _is_unicode(given)
    ):
        raise InvalidNameError(
            f"Received the name {name!a}; valid is a text of 1 … 200 bytes without / that does not begin with a dot."
        )
    return name


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _encoded(pointer: Pointer) -> bytes:
    """:raises SerialisationError: its labels are not JSON."""
    try:
        stored = {"session": pointer.session, "segment": pointer.segment, "labels": dict(pointer.labels)}
        return json.dumps(stored, ensure_ascii=False, allow_nan=False, indent=2).encode() + b"\n"
    except (TypeError, ValueError, RecursionError):
        raise SerialisationError("The labels of the pointer are not JSON in UTF-8.") from None


class Pointers:
    """Records `{root}/{name}.json`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)

    def _path(self, name: str) -> Path:
        return self._root / f"{check_name(name)}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        files.make_directory(self._root)
        path = self._root / ".lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        except OSError as error:
            raise io_error("open the lock", path, error) from error
        try:
            locks.take(fd, locks.EXCLUSIVE, path, _LOCK_TIMEOUT)
            yield
        finally:
            os.close(fd)

    def read(self, name: str) -> Pointer | None:
        """The record; None when there is none.

        :raises CorruptError: it cannot be read.
        """
        path = self._path(name)
        try:
            stored = json.loads(path.read_bytes())
            session, segment, labels = stored["session"], stored["segment"], stored["labels"]
            if not is_id(session) or not (segment is None or is_id(segment)) or not isinstance(labels, dict):
                raise ValueError
            return Pointer(session, segment, labels)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise io_error("read", path, error) from error
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CorruptError(
                str(path), 1, 0, 0, "not a pointer record", next_step="Remove the file and write the pointer again."
            ) from None

    def write(self, name: str, pointer: Pointer) -> None:
        """Put *pointer* in the place of what was there."""
        self.update(name, lambda _: pointer)

    def update(self, name: str, change: Callable[[Pointer | None], Pointer]) -> Pointer:
        """Read, change and write under the lock."""
        path = self._path(name)
        with self._locked():
            pointer = change(self.read(name))
            check_id(pointer.session, "session")
            if pointer.segment is not None:
                check_id(pointer.segment, "segment")
            data = _encoded(pointer)
            temporary = self._root / f".{name}.{secrets.token_hex(6)}.tmp"
            files.write_new(temporary, [data])
            failpoints.hit(WRITTEN)
            try:
                temporary.rename(path)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise io_error("write", path, error) from error
            failpoints.hit(RENAMED)
            files.sync_directory(self._root)
        return pointer

    def delete(self, name: str) -> None:
        """Forget *name*; fine when it is not there."""
        path = self._path(name)
        with self._locked():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise io_error("delete", path, error) from error
            files.sync_directory(self._root)

    def names(self) -> list[str]:
        """All names, sorted."""
        found = self._root.glob("*.json") if self._root.is_dir() else ()
        return sorted(path.name.removesuffix(".json") for path in found if not path.name.startswith("."))
