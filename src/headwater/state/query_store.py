"""QueryStore: what one query knows for good, in a store that the queries of one process share.

========================  ==========================================================================================
``pipelines/<pipeline>``  the pipeline store: one section for each sink and derived table; the driver writes it
``queries/<query>``       the store of a query that is not of a pipeline: one section
========================  ==========================================================================================

A section has its own tables: plans, backfills, progress in the logs, deliveries, parked tables, answers. Its key is a
number of four bytes; the directory, under number 0, gives the number and the *generation* of each query. Whoever opens
a section for writing gets the next generation, and the writer before is fenced, in this process or another.

Seals of several queries that are asked for at the same time become one. A write that only saves work after a crash can
be deferred: it becomes durable with the next seal of its query.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Protocol, Self

from headwater.state.batch import Delete, DeleteRange, Puts, WriteBatch, prefix_end
from headwater.state.beside import beside, open_small_reader, open_small_writer
from headwater.state.catalog import Catalog
from headwater.state.errors import (
    StateError,
    StoreCorrupt,
    StoreNotFound,
    StoreOwned,
    StoreUnavailable,
    WriterFenced,
)
from headwater.state.handle import Closable
from headwater.state.location import identity
from headwater.state.store import Snapshot, StateReader, StateStore
from headwater.stream.epoch import Epoch, EpochClock
from headwater.system.process import host_name, started

QUERIES: Final = "queries"
PIPELINES: Final = "pipelines"

_DIRECTORY: Final = b"\x00\x00\x00\x00"


def own_state(location: str, query: str) -> str:
    """Where the state of *query* is, which is not of a pipeline; *location* is that of the logs."""
    return beside(location, QUERIES, query)


def pipeline_state(location: str, pipeline: str) -> str:
    """Where the state of all queries of *pipeline* is; *location* is that of the logs."""
    return beside(location, PIPELINES, pipeline)


class Sealed(Protocol):
    """Tables whose rows are written batch by batch."""

    @property
    def catalog(self) -> Catalog: ...

    def snapshot(self) -> Snapshot: ...

    def seal(self, batch: WriteBatch) -> None: ...

    def defer(self, batch: WriteBatch) -> None: ...

    def close(self) -> None: ...


class SectionView:
    """The keys of one section, as a snapshot of the whole store has them."""

    def __init__(self, view: Snapshot, prefix: bytes) -> None:
        self._view, self._prefix = view, prefix

    @property
    def epoch(self) -> Epoch:
        return self._view.epoch

    def get(self, key: bytes) -> bytes | None:
        return self._view.get(self._prefix + key)

    def scan(
        self, start: bytes | None = None, end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        last = prefix_end(self._prefix) if end is None else self._prefix + end
        return self._without_prefix(self._view.scan(self._prefix + (start or b""), last, reverse=reverse))

    def scan_prefix(self, prefix: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        return self._without_prefix(self._view.scan_prefix(self._prefix + prefix, reverse=reverse))

    def _without_prefix(self, rows: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        length = len(self._prefix)
        for key, value in rows:
            yield key[length:], value

    def close(self) -> None:
        self._view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.close()


class QueryStore(Closable):
    """The section of one query, open for writing; any thread.

    :ivar query: its name. :ivar generation: of this writer: a later one has a higher number.
    :ivar catalog: of its tables. All that write to the section open their tables here.
    """

    def __init__(self, shared: _Shared, query: str, prefix: bytes, generation: int) -> None:
        super().__init__()
        self._shared, self._prefix = shared, prefix
        self.query, self.generation = query, generation
        self._deferred = WriteBatch()
        self._has_failed = False
        self._lock = threading.Lock()
        with self.snapshot() as view:
            self.catalog = Catalog.load(view)

    def snapshot(self) -> SectionView:
        """The newest seal. What is deferred is not in it: see :meth:`flush`."""
        self._check_open()
        return SectionView(self._shared.snapshot(), self._prefix)

    def seal(self, batch: WriteBatch) -> None:
        """Make *batch* durable, with what was deferred before it.

        :raises WriterFenced: another writer has the section. :raises StoreFull: no room; seal the same batch again.
        """
        self._check_open()
        with self._lock:
            deferred, self._deferred = self._deferred, WriteBatch()
        joined = WriteBatch()
        joined.extend(deferred)
        joined.extend(batch)
        try:
            self._shared.seal(self, _shifted(joined, self._prefix))
        except BaseException:
            with self._lock:
                deferred.extend(self._deferred)
                self._deferred, self._has_failed = deferred, True
            raise
        self._has_failed = False

    def defer(self, batch: WriteBatch) -> None:
        """Make *batch* durable with the next seal, or with :meth:`flush`.

        A close flushes it, unless a seal has failed or an error ends the ``with`` block: what was to become durable
        with it did not.
        """
        self._check_open()
        with self._lock:
            self._deferred.extend(batch)

    def flush(self) -> None:
        """Make durable what was deferred."""
        if self._deferred:
            self.seal(WriteBatch())

    def clear(self) -> None:
        """Forget all rows of the section; its generation stays."""
        batch = WriteBatch()
        batch.delete_range()
        self.seal(batch)
        self.catalog = Catalog({})

    def close(self) -> None:
        if not self.closed:
            try:
                if self._pid == os.getpid() and not self._has_failed:
                    with suppress(StateError):
                        self.flush()
            finally:
                super().close()
                self._shared.leave(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_failed |= error is not None
        self.close()


class QueryReader(Closable):
    """The section of one query, from any process. :raises StoreNotFound: there is no such store."""

    def __init__(self, state: str, query: str) -> None:
        super().__init__()
        self._reader, self._query, self._state = open_small_reader(state), query, state

    def snapshot(self) -> SectionView:
        """The newest seal. :raises StoreNotFound: nothing was sealed for this query yet."""
        view = self._reader.snapshot()
        try:
            entry = _entry(view, self._query)
            if entry is None:
                raise StoreNotFound(f"There is no query {self._query!r} in {self._state}.")
            return SectionView(view, _prefix(entry))
        except BaseException:
            view.close()
            raise

    def close(self) -> None:
        super().close()
        self._reader.close()


def open_query_store(state: str, query: str, *, takeover: bool = False) -> QueryStore:
    """The section of *query* in the store at *state*, created when it does not exist.

    :param takeover: a writer that has the section, or the store, is fenced.
    :raises StoreOwned: another writer has it.
    """
    key = identity(state)
    with _lock_of(key):
        shared = _open.get(key)
        if shared is not None and shared.is_usable:
            try:
                return shared.enter(query, takeover=takeover)
            except (WriterFenced, StoreUnavailable) as error:  # its handle does not recover
                shared.end(error)
        shared = _open[key] = _Shared(open_small_writer(state, takeover=takeover), state, key)
        try:
            return shared.enter(query, takeover=takeover)
        except BaseException:
            shared.close_if_unused()
            raise


def sections(reader: StateReader) -> Generator[tuple[str, SectionView], None, None]:
    """The queries of a store with their sections, all of one snapshot; each view ends with its turn."""
    with reader.snapshot() as view:
        for _, value in view.scan_prefix(_DIRECTORY):
            entry = _parsed(value)
            yield entry["query"], SectionView(view, _prefix(entry))


class _Asked:
    """A batch that waits for its seal."""

    __slots__ = ("batch", "error", "is_done", "section")

    def __init__(self, section: QueryStore, batch: WriteBatch) -> None:
        self.section, self.batch = section, batch
        self.is_done = False
        self.error: BaseException | None = None


class _Shared:
    """The one writer of a store in this process, and the sections that are open in it."""

    def __init__(self, store: StateStore, state: str, key: str) -> None:
        self._store, self._state, self._key, self._pid = store, state, key, os.getpid()
        self._clock = EpochClock(_now_ms, store.committed_epoch())
        self._sections: dict[str, QueryStore] = {}
        self._users = 0
        self._asked: list[_Asked] = []
        self._asked_lock, self._seal_lock = threading.Lock(), threading.Lock()
        self._over: StateError | None = None

    @property
    def is_usable(self) -> bool:
        return self._over is None and self._pid == os.getpid()

    def snapshot(self) -> Snapshot:
        if self._over is not None:
            raise self._over
        return self._store.snapshot()

    def end(self, why: StateError) -> None:
        """Under the lock of the store. Its sections are refused from now on; the store can be opened again."""
        self._over = why
        with suppress(StateError):
            self._store.close()

    def enter(self, query: str, *, takeover: bool) -> QueryStore:
        """Under the lock of the store."""
        if query in self._sections and not takeover:
            raise StoreOwned(f"{self._state}, query {query}", host_name(), os.getpid(), started())
        batch = WriteBatch()
        with self.snapshot() as view:
            entry = _entry(view, query)
            if entry is None:
                numbers = [_parsed(value)["id"] for _, value in view.scan_prefix(_DIRECTORY)]
                entry = {"id": max(numbers, default=0) + 1, "generation": 0, "query": query}
        entry["generation"] += 1
        batch.put(_directory_key(query), json.dumps(entry).encode())
        with self._seal_lock:
            self._seal(batch)
            section = QueryStore(self, query, _prefix(entry), entry["generation"])
            self._sections[query] = section
        self._users += 1
        return section

    def seal(self, section: QueryStore, batch: WriteBatch) -> None:
        """One thread seals what all have asked for meanwhile."""
        mine = _Asked(section, batch)
        with self._asked_lock:
            self._asked.append(mine)
        with self._seal_lock:
            if not mine.is_done:
                with self._asked_lock:
                    asked, self._asked = self._asked, []
                self._seal_all(asked)
        if mine.error is not None:
            raise mine.error

    def _seal_all(self, asked: list[_Asked]) -> None:
        joined = WriteBatch()
        current = []
        for one in asked:
            one.is_done = True
            if self._sections.get(one.section.query) is one.section:
                joined.extend(one.batch)
                current.append(one)
            else:
                one.error = WriterFenced(
                    f"Query {one.section.query!r} was started again: this is generation {one.section.generation} of it."
                )
        if not current:
            return
        try:
            self._seal(joined)
        except BaseException as error:
            for one in current:
                one.error = error

    def _seal(self, batch: WriteBatch) -> None:
        if self._over is not None:
            raise self._over
        try:
            self._store.seal(self._clock.next(), batch)
        except WriterFenced as error:
            self._over = error
            raise

    def leave(self, section: QueryStore) -> None:
        with _lock_of(self._key):
            if self._sections.get(section.query) is section:
                del self._sections[section.query]
            self._users -= 1
            self.close_if_unused()

    def close_if_unused(self) -> None:
        """Under the lock of the store."""
        if not self._users:
            if _open.get(self._key) is self:
                del _open[self._key]
            self._store.close()


_open: dict[str, _Shared] = {}
_locks: dict[str, threading.RLock] = {}
"""One for each store: opening or closing one that hangs holds up no other."""


def _lock_of(key: str) -> threading.RLock:
    return _locks.setdefault(key, threading.RLock())


def _after_fork_in_child() -> None:
    _locks.clear()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _entry(view: Snapshot, query: str) -> dict[str, Any] | None:
    value = view.get(_directory_key(query))
    return None if value is None else _parsed(value)


def _parsed(value: bytes) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(bytes(value))
    except ValueError as error:
        raise StoreCorrupt(
            "The directory of a query store cannot be read: an earlier release wrote it, or it is damaged.",
            next_step="Begin with an empty store and an empty sink.",
        ) from error
    if entry.keys() != {"id", "generation", "query"}:
        raise StoreCorrupt(
            "An earlier release wrote this state of a query; this release cannot read it.",
            next_step="Begin with an empty store and an empty sink.",
        )
    return entry


def _directory_key(query: str) -> bytes:
    return _DIRECTORY + hashlib.sha256(query.encode()).digest()[:16]


def _prefix(entry: dict[str, Any]) -> bytes:
    return int(entry["id"]).to_bytes(4, "big")


def _shifted(batch: WriteBatch, prefix: bytes) -> WriteBatch:
    """*batch* with keys of the section."""
    shifted = WriteBatch()
    for step in batch.steps():
        match step:
            case Puts(items):
                shifted.put_many((prefix + key, value) for key, value in items)
            case Delete(key):
                shifted.delete(prefix + key)
            case DeleteRange(start, end):
                last = prefix_end(prefix) if end is None else prefix + end
                shifted.delete_range(prefix + (start or b""), last)
    return shifted


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
