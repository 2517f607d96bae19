"""Rows to write into a log, and a reader of one log, for tests of the log store and of what is built on it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Self

import pyarrow as pa

from headwater.log_store import KvLogStoreReader, LogStoreVnodeProgress, LogView, StoragePlace
from headwater.stream import Chunk, Epoch, Op, VnodeBitmap

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
KEY = ("id",)


def epoch(number: int) -> Epoch:
    """A small epoch, for reading tests."""
    return Epoch.from_ms(number)


def random_chunk(
    rng: random.Random, rows: int = 10, vnode_count: int = 256, vnodes: VnodeBitmap | None = None
) -> Chunk:
    """Inserts, deletes and update pairs of random keys; of *vnodes* only, when given."""
    ids: list[int] = []
    ops: list[Op] = []
    while len(ids) < rows:
        key = rng.randrange(1 << 40)
        if rng.random() < 0.3 and len(ids) + 2 <= rows:
            ids += (key, key)
            ops += (Op.UPDATE_DELETE, Op.UPDATE_INSERT)
        else:
            ids.append(key)
            ops.append(rng.choice((Op.INSERT, Op.DELETE)))
    names = [f"name {rng.randrange(1000)}" for _ in ids]
    batch = pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array(names)], schema=SCHEMA)
    chunk = Chunk.build(batch, pa.array([int(op) for op in ops], pa.int8()), KEY, vnode_count)
    return chunk if vnodes is None else filtered(chunk, vnodes)


def filtered(chunk: Chunk, vnodes: VnodeBitmap) -> Chunk:
    """The rows of *chunk* whose vnode is in *vnodes*."""
    owned = pa.array(vnodes.mask_of(chunk.vnodes))
    return Chunk(chunk.rows.filter(owned), chunk.ops.filter(owned), chunk.vnodes.filter(owned))


def numbered_chunk(first: int, rows: int, vnode_count: int = 256) -> Chunk:
    """Inserts of the keys from *first* on."""
    ids = pa.array(range(first, first + rows), pa.int64())
    batch = pa.RecordBatch.from_arrays([ids, pa.array([f"name {number}" for number in ids])], schema=SCHEMA)
    return Chunk.inserts(batch, KEY, vnode_count)


def rows_of(chunks: Chunk | Sequence[Chunk]) -> list[tuple[int, int, str]]:
    """Rows as sorted tuples (op, id, name): what was delivered, whatever the order between vnodes."""
    found: list[tuple[int, int, str]] = []
    for chunk in [chunks] if isinstance(chunks, Chunk) else chunks:
        columns = (chunk.ops, chunk.rows.column("id"), chunk.rows.column("name"))
        found += zip(*(column.to_pylist() for column in columns), strict=True)
    return sorted(found)


class LogConsumer:
    """A reader of one log: each wait begins after what was delivered."""

    def __init__(self, reader: KvLogStoreReader, log: str) -> None:
        self.reader, self.log = reader, log

    @classmethod
    def open(cls, location: str, log: str, name: str, *, start: Epoch | None = None, takeover: bool = False) -> Self:
        return cls(KvLogStoreReader.open(location, name, [log], start=start, takeover=takeover), log)

    @property
    def progress(self) -> LogStoreVnodeProgress:
        return self.reader.consumer(self.log).progress

    @property
    def started(self) -> Epoch:
        return self.reader.consumer(self.log).started

    def delivered(self) -> Epoch:
        return self.reader.consumer(self.log).delivered()

    def wait(self, timeout: float) -> tuple[Epoch, Epoch]:
        """The epochs ``(after, upto]`` that are sealed and not delivered; empty when none came."""
        after = self.delivered()
        self.reader.start_from(after)
        sealed = self.reader.next_item(timeout=timeout)
        return after, after if sealed is None else sealed.end

    def read(self, after: Epoch, upto: Epoch, vnodes: VnodeBitmap | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a range; what was delivered in part comes without that part's vnodes."""
        wanted = VnodeBitmap.full(self.progress.vnode_count) if vnodes is None else vnodes
        with self.reader._source.mapped_snapshot() as view:
            shown = LogView.open(view, self.log)
            shown.check_range(after, upto)
            for end in shown.epochs(after, upto):
                done = [vnode for vnode, place in self.progress.places() if place >= StoragePlace(end.epoch)]
                yield from shown.read_epoch(end, wanted - VnodeBitmap.of(done, self.progress.vnode_count))

    def commit(self, upto: Epoch, vnodes: VnodeBitmap | None = None) -> None:
        self.reader.truncate({self.log: upto}, vnodes)

    def rewind(self, epoch: Epoch) -> None:
        self.reader.rewind(epoch)

    def drop(self) -> None:
        self.reader.drop([self.log])

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
