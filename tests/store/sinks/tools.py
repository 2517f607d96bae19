"""A log with a sink behind it: the sink is a list in memory that can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.log_store import FlushOptions, KvLogStoreFactory, KvLogStoreReader, KvLogStoreWriter
from headwater.log_store.protocols import LogReader
from headwater.log_store.rewind import RewindDelay
from headwater.log_store.testing import KEY, SCHEMA, epoch
from headwater.log_store.writer import Flush
from headwater.sinks import CheckpointDelivery, SinkLoop
from headwater.state import StateStore
from headwater.stream import Chunk, Epoch, EpochPair, Op, VnodeBitmap

Row = tuple[int, int, str]


@dataclass
class Pipe:
    """One writer and its reader, which is for a sink to begin."""

    factory: KvLogStoreFactory
    reader: KvLogStoreReader
    writer: KvLogStoreWriter

    @classmethod
    def open(
        cls,
        store: StateStore,
        at: int,
        log_format: int,
        *,
        vnodes: VnodeBitmap | None = None,
        factory: KvLogStoreFactory | None = None,
        max_rows: int = 65_536,
    ) -> Pipe:
        made = factory or KvLogStoreFactory(store)
        log = made.log("orders", SCHEMA, KEY, log_format)
        # The log's own delays are shown elsewhere.
        reader, writer = made.pair(log, "sink", vnodes, max_rows=max_rows, delays=RewindDelay(jitter=lambda: 0.0))
        writer.init(EpochPair(curr=epoch(at), prev=epoch(at - 1)))
        return cls(made, reader, writer)

    def write(self, following: int, *chunks: Chunk, **options: Any) -> None:
        """An epoch of *chunks*, sealed if it is a checkpoint."""
        ended = self.writer.epoch
        self.end(following, *chunks, **options).finish()
        if options.get("is_checkpoint", True):
            self.factory.sealer.seal(ended)

    def end(self, following: int, *chunks: Chunk, **options: Any) -> Flush:
        """The same, not finished and not sealed."""
        for chunk in chunks:
            self.writer.write_chunk(chunk)
        return self.writer.flush_current_epoch(epoch(following), FlushOptions(**options))

    def loop(self, build: Callable[[Mapping[str, str]], Any], **options: Any) -> SinkLoop:
        reader: LogReader = options.pop("reader", self.reader)
        chosen: dict[str, Any] = {"jitter": lambda: 0.0, **options}
        return SinkLoop(reader, build, **chosen)


def changes_of(chunk: Chunk) -> list[Row]:
    columns = (chunk.ops, chunk.rows.column("id"), chunk.rows.column("name"))
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


@dataclass
class Outside:
    """The other side: what was committed, and up to which epoch, kept together; it outlives its writers."""

    rows: list[Row] = field(default_factory=list)
    committed: list[Epoch] = field(default_factory=list)
    starts: list[dict[str, str]] = field(default_factory=list)
    aborts: int = 0
    knows_epochs: bool = True
    on_write: Callable[[Epoch, Chunk], None] = lambda epoch, chunk: None
    before_commit: Callable[[Epoch], None] = lambda epoch: None
    after_commit: Callable[[Epoch], None] = lambda epoch: None

    def build(self, settings: Mapping[str, str], interval: int = 1, idle_seconds: float = 99.0) -> CheckpointDelivery:
        self.starts.append(dict(settings))
        return CheckpointDelivery(Inside(self), interval, idle_seconds=idle_seconds)

    def table(self) -> dict[int, str]:
        """The rows as a table by key."""
        found: dict[int, str] = {}
        for op, key, name in self.rows:
            if Op(op).adds:
                found[key] = name
            else:
                found.pop(key, None)
        return found


class Inside:
    """One life of a writer to :class:`Outside`. If it knows epochs, what was committed is not taken again."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside
        self.staged: list[tuple[Epoch, list[Row]]] = []

    def write(self, epoch: Epoch, chunk: Chunk) -> None:
        self.outside.on_write(epoch, chunk)
        self.staged.append((epoch, changes_of(chunk)))

    def barrier(self, epoch: Epoch, is_checkpoint: bool) -> None:
        if not is_checkpoint:
            return
        self.outside.before_commit(epoch)
        last = max(self.outside.committed, default=Epoch(0)) if self.outside.knows_epochs else Epoch(0)
        self.outside.rows += [row for at, rows in self.staged if at > last for row in rows]
        self.outside.committed.append(epoch)
        self.staged.clear()
        self.outside.after_commit(epoch)

    def abort(self) -> None:
        self.outside.aborts += 1
