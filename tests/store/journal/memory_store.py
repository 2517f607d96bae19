"""Segments in memory: the smallest store that keeps the contract, as the model of the file store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headwater.journal import codec, reader
from headwater.journal.entry import Entry, Head, Limits, Truncation, check_id, new_id
from headwater.journal.errors import (
    AlreadyExistsError,
    HeadConflictError,
    SegmentDeletedError,
    SegmentNotFoundError,
    StoreClosedError,
)
from headwater.journal.fs_store import now_ms
from headwater.journal.store import Store, changed_meanwhile, plan_truncation, settled_end
from headwater.system.owner_lock import Owner, OwnerLock, current_owner


class MemorySource:
    """A byte array as a source."""

    def __init__(self, data: bytearray, name: str) -> None:
        self._data = data
        self.name = name

    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._data[offset : offset + length])


class MemoryStore(Store):
    """Everything in dictionaries, under one lock. Owners are locks of files here, too."""

    def __init__(self, *, limits: Limits | None = None, clock: Callable[[], int] = now_ms) -> None:
        self.limits = limits or Limits()
        self._clock = clock
        self._lock = threading.RLock()
        self.data: dict[tuple[str, str], bytearray] = {}
        self.saved: dict[str, bytes] = {}
        self._modified: dict[tuple[str, str], int] = {}
        self._deleted: set[str] = set()
        self._traces: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._closed = False
        self._owners = TemporaryDirectory()

    def _bytes(self, session: str, segment: str) -> bytearray:
        if self._closed:
            raise StoreClosedError("The store is closed.", next_step="Open it again.")
        key = (check_id(session, "session"), check_id(segment, "segment"))
        if session in self._deleted:
            raise SegmentDeletedError(session, segment)
        if key not in self.data:
            raise SegmentNotFoundError(session, segment)
        return self.data[key]

    def _touch(self, session: str, segment: str) -> None:
        self._modified[session, segment] = self._clock()

    def append(
        self,
        session: str,
        segment: str,
        entry: Entry | Sequence[Entry],
        *,
        expected_head: Head | None = None,
        idempotency_key: str | None = None,
    ) -> Head:
        items = codec.prepare_all(entry, self.limits, idempotency_key)
        with self.source(session, segment, still=True) as source:
            end = settled_end(source)
            if idempotency_key is not None:
                for known in self.iter(session, segment):
                    if known.key == idempotency_key:
                        return known.head
            if expected_head is not None and expected_head != end.head:
                raise HeadConflictError(segment, expected_head, end.head)
            data, head = codec.lines(items, end.head, self._clock())
            self._bytes(session, segment)[end.offset :] = data
            self._touch(session, segment)
            return head

    def create_segment(self, session: str, segment: str, entries: Iterable[Entry] = ()) -> Head:
        key = (check_id(session, "session"), check_id(segment, "segment"))
        lines = codec.NewSegment(session, segment, entries, self.limits, self._clock())
        with self._lock:
            if session in self._deleted:
                raise SegmentDeletedError(session, segment)
            if key in self.data:
                raise AlreadyExistsError(
                    f"Session {session} has a segment {segment} already.",
                    next_step="Append to it, or create one with a new id.",
                )
            data = bytearray(b"".join(lines))
            self.data[key] = data
            self._touch(session, segment)
        return lines.head

    def truncate(self, session: str, segment: str, n: int, *, expected_head: Head | None = None) -> Truncation:
        with self.source(session, segment, still=True) as source:
            end = plan_truncation(source, segment, n, expected_head)
            if end is None:
                return Truncation(settled_end(source).head, None)
            return Truncation(end[1], self.cut(session, segment, end[0], f"removed-{n + 1}", source.size()))

    def cut(self, session: str, segment: str, offset: int, label: str, expected_size: int) -> str:
        with self._lock:
            data = self._bytes(session, segment)
            if len(data) != expected_size:
                raise changed_meanwhile(segment)
            saved = f"memory#{segment}.{label}.{new_id()[-12:]}"
            self.saved[saved] = bytes(data[offset:])
            del data[offset:]
            self._touch(session, segment)
        return saved

    def append_trace(self, session: str, segment: str, record: Mapping[str, Any]) -> bool:
        key = (check_id(session, "session"), check_id(segment, "segment"))
        self._traces.setdefault(key, []).append({"ts": self._clock(), **record})
        return True

    def iter_trace(self, session: str, segment: str) -> Iterator[dict[str, Any]]:
        return iter(list(self._traces.get((session, segment), [])))

    def delete_session(self, session: str, *, modified_at: int | None = None) -> bool:
        with self._lock:
            if modified_at is not None and self.session_modified_at(session) != modified_at:
                return False
            segments = self.segment_ids(session)
            for segment in segments:
                del self.data[session, segment]
                self._traces.pop((session, segment), None)
            if segments:
                self._deleted.add(session)
        return bool(segments)

    def own(self, session: str) -> OwnerLock:
        return OwnerLock(Path(self._owners.name) / check_id(session, "session"), f"Session {session}")

    def owner(self, session: str) -> Owner | None:
        return current_owner(Path(self._owners.name) / check_id(session, "session"))

    def sync(self, session: str, segment: str) -> None:
        self._bytes(session, segment)

    def close(self) -> None:
        self._closed = True
        self._owners.cleanup()

    def exists(self, session: str, segment: str) -> bool:
        try:
            self._bytes(session, segment)
        except SegmentNotFoundError:
            return False
        return True

    def session_ids(self) -> list[str]:
        return list({session for session, _ in self.data})

    def segment_ids(self, session: str) -> list[str]:
        check_id(session, "session")
        return [segment for held, segment in self.data if held == session]

    def modified_at(self, session: str, segment: str) -> int | None:
        return self._modified.get((session, segment)) if (session, segment) in self.data else None

    def location(self, session: str, segment: str) -> str:
        return f"memory#{segment}"

    @contextmanager
    def source(self, session: str, segment: str, *, still: bool = False) -> Iterator[reader.SegmentBytes]:
        with self._lock if still else nullcontext():
            yield MemorySource(self._bytes(session, segment), self.location(session, segment))
