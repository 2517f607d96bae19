"""A synced log, and somebody who polls it and seals what he got together with each checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headwater.log_store import KvLogStoreFactory, LogView
from headwater.log_store.aligned import AlignedLogStore
from headwater.log_store.synced import SyncedLogStore, SyncedMessage, SyncedOptions
from headwater.log_store.testing import KEY, SCHEMA, epoch
from headwater.state import StateReader, StateStore
from headwater.stream import Barrier, BarrierKind, Chunk, EpochPair, Mutation, VnodeBitmap

WORK = b"\x7f\xff\xff\xff"
"""The front of the keys under which what was worked on is kept: above all state tables, below all logs."""

Row = tuple[int, int, int, str]


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def rows_in_order(chunks: Chunk | Sequence[Chunk]) -> list[Row]:
    """Vnode, op, id and name of each row."""
    found: list[Row] = []
    for chunk in [chunks] if isinstance(chunks, Chunk) else chunks:
        columns = (chunk.vnodes, chunk.ops, chunk.rows.column("id"), chunk.rows.column("name"))
        found += zip(*(column.to_pylist() for column in columns), strict=True)
    return found


def by_vnode(rows: Sequence[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found


def committed(store: StateReader) -> list[Row]:
    """What was worked on, as the last seal has it."""
    with store.snapshot() as view:
        return [tuple(row) for _, data in view.scan_prefix(WORK) for row in json.loads(bytes(data))]


def log_keys(store: StateReader, number: int = 1) -> int:
    """How many keys the log has in the store: rows, chunks and barriers."""
    with store.snapshot() as view:
        return sum(1 for _ in view.scan_prefix((0x8000_0000 + number).to_bytes(4, "big")))


class Run:
    """One life of a synced log with one instance, up to a crash."""

    def __init__(
        self,
        store: StateStore,
        log_format: int = 2,
        *,
        vnodes: VnodeBitmap | None = None,
        aligned: bool = False,
        factory: KvLogStoreFactory | None = None,
        owner: str | None = None,
        mutation: Mutation | None = None,
        begin: bool = True,
        **options: Any,
    ) -> None:
        self.store = store
        self.clock = Clock()
        self.factory = factory or KvLogStoreFactory(store)
        self.log = self.factory.log("orders", SCHEMA, KEY, log_format)
        self.now = store.committed_epoch().ms + 1
        self.got: list[Chunk] = []
        self.synced: SyncedLogStore | AlignedLogStore
        if aligned:
            self.synced = self.factory.synced.aligned(self.log, vnodes, owner=owner, **options)
        else:
            chosen = SyncedOptions(**options)
            self.synced = self.factory.synced.store(self.log, vnodes, owner=owner, options=chosen, clock=self.clock)
        if begin:
            pair = EpochPair(epoch(self.now), epoch(self.now - 1))
            self.synced.push(Barrier(pair, BarrierKind.INITIAL, mutation))
            assert isinstance(self.synced.poll(), Barrier)

    def barrier(self, kind: BarrierKind = BarrierKind.CHECKPOINT, mutation: Mutation | None = None) -> Barrier:
        """Push the next barrier."""
        barrier = Barrier(EpochPair(epoch(self.now + 1), epoch(self.now)), kind, mutation)
        self.synced.push(barrier)
        self.now += 1
        return barrier

    def poll(self) -> SyncedMessage | None:
        """Poll once: work on rows, seal at checkpoints."""
        item = self.synced.poll()
        if isinstance(item, Chunk):
            self.got.append(item)
        elif isinstance(item, Barrier) and item.is_durable:
            self.work(item)
            self.factory.sealer.seal(item.closes)
        return item

    def work(self, barrier: Barrier) -> None:
        """Add what was worked on to the seal."""
        key = WORK + int(barrier.closes).to_bytes(8, "big") + self.synced.log.state.vnodes.to_bytes()
        self.factory.sealer.batch.put(key, json.dumps(rows_in_order(self.got)).encode())
        self.got = []

    def polls(self) -> list[SyncedMessage]:
        """All that comes until nothing does."""
        found: list[SyncedMessage] = []
        while (item := self.poll()) is not None:
            found.append(item)
        return found

    def checkpoint(self, kind: BarrierKind = BarrierKind.CHECKPOINT, mutation: Mutation | None = None) -> None:
        """Push a barrier and poll until it comes."""
        barrier = self.barrier(kind, mutation)
        while (item := self.poll()) is not barrier:
            assert item is not None

    def drain(self) -> None:
        self.checkpoint(BarrierKind.SYNC_CHECKPOINT)

    def epochs_held(self) -> list[int]:
        with self.store.snapshot() as view:
            return [end.epoch.ms for end in LogView.open(view, "orders").epochs()]
