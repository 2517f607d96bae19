"""A log that is written epoch by epoch, and what it should hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from tests.logs import KEY, SCHEMA, epoch, random_chunk

from headwater.log_store import KvLogStoreFactory, LogView
from headwater.state import StateStore, open_writer
from headwater.stream import Chunk, Epoch, EpochPair, Op

Row = tuple[int, int, int, int, Any, Any]


class Table:
    """The log ``orders`` in a store, its writer, and epochs numbered from 1."""

    def __init__(self, location: str, log_format: int = 2, **options: Any) -> None:
        self.location = location
        self.rng = random.Random(11)
        self.log_format, self.options = log_format, options
        self.now = 1_000_000
        self.open()

    def open(self, takeover: bool = False) -> None:
        self.store: StateStore = open_writer(self.location, takeover=takeover)
        self.factory = KvLogStoreFactory(self.store, **{"clock": lambda: self.now, **self.options})
        self.log = self.factory.log("orders", SCHEMA, KEY, self.log_format)
        self.next = self.store.committed_epoch().ms + 1
        self.writer = self.factory.writer(self.log)
        self.writer.init(EpochPair(epoch(self.next), Epoch(0) if self.next == 1 else epoch(self.next - 1)))

    def write(self, *chunks: Chunk, rows: int = 40, seal: bool = True) -> int:
        """One epoch of *chunks*, or of random rows."""
        number = self.next
        for chunk in chunks or (random_chunk(self.rng, rows), random_chunk(self.rng, rows)):
            self.writer.write_chunk(chunk)
        self.end_epoch()
        if seal:
            self.factory.sealer.seal(epoch(number))
        return number

    def end_epoch(self) -> None:
        self.next += 1
        self.now += 1000
        self.writer.end_epoch(epoch(self.next))

    def seal(self) -> None:
        """A seal of an epoch without rows."""
        number = self.next
        self.next += 1
        self.writer.end_epoch(epoch(self.next))
        self.factory.sealer.seal(epoch(number))

    def close(self) -> None:
        self.factory.close()
        self.store.close()

    def rows(self) -> list[Row]:
        """Everything that the log holds: vnode, epoch, seq, op, id, name; ordered."""
        return sorted(self.rows_in_order())

    def rows_in_order(self) -> list[Row]:
        with self.store.snapshot() as view:
            shown = LogView.open(view, "orders")
            return list(flat(shown.read_range(shown.bounds().gone, shown.sealed)))

    def formats(self) -> dict[int, tuple[int, ...]]:
        with self.store.snapshot() as view:
            return {end.epoch.ms: end.formats.numbers for end in LogView.open(view, "orders").epochs()}

    def raw(self, space: int) -> int:
        """How many keys there are in a space of the log."""
        prefix = (0x8000_0000 + self.log.number).to_bytes(4, "big") + bytes((space,))
        with self.store.snapshot() as view:
            return sum(1 for _ in view.scan_prefix(prefix))


def flat(batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    for batch in batches:
        names = ("_vnode", "_epoch", "_seq", "_op", "id", "name")
        yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


def chunk(rows: Sequence[tuple[Op, int, str]]) -> Chunk:
    """A chunk of (op, id, name)."""
    ops, ids, names = zip(*rows, strict=True)
    batch = pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array(names, pa.string())], schema=SCHEMA)
    return Chunk.build(batch, pa.array([int(op) for op in ops], pa.int8()), KEY)


def final_state(rows: Sequence[Row], start: dict[int, Any] | None = None) -> dict[int, Any]:
    """The table after these changes, by key."""
    state = dict(start or {})
    for _, _, _, op, key, name in sorted(rows, key=lambda row: (row[1], row[0], row[2])):
        if Op(op).adds:
            state[key] = name
        else:
            state.pop(key, None)
    return state
