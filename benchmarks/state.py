"""State store: sealing and scanning against the bare engine, and how soon a reader sees an epoch.

The bound is LMDB itself through its own Python binding, doing the same durable work in the same run: one
transaction with ``putmulti`` and an fdatasync per epoch, one cursor over all keys.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa

from _harness import Figure, interleaved, main, progress, scratch
from headwater.state import StateStore, WriteBatch, open_writer
from headwater.stream.epoch import Epoch

ROWS = 10_000
VNODES = 16

Cells = list[tuple[bytes, Any]]


def small_rows(epoch: int) -> Cells:
    rng = random.Random(epoch)
    body = rng.randbytes(230)
    return [
        (
            b"\x00\x00\x00\x01" + (row % VNODES).to_bytes(2, "big") + epoch.to_bytes(8, "big") + row.to_bytes(4, "big"),
            body,
        )
        for row in range(ROWS)
    ]


def arrow_chunks(epoch: int) -> Cells:
    rows = ROWS // VNODES
    columns = {f"c{place}": pa.array(range(rows), pa.int64()) for place in range(8)}
    columns["text"] = pa.array([f"value {epoch} {row} " + "x" * 140 for row in range(rows)])
    batch = pa.RecordBatch.from_pydict(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    chunk = memoryview(sink.getvalue())
    return [
        (b"\x00\x00\x00\x02" + vnode.to_bytes(2, "big") + epoch.to_bytes(8, "big"), chunk) for vnode in range(VNODES)
    ]


class Bare:
    """LMDB with nothing around it."""

    def __init__(self, folder: Path) -> None:
        self.environment: Any = lmdb.open(str(folder / "bare"), map_size=1 << 40)

    def seal(self, cells: Cells) -> None:
        with self.environment.begin(write=True) as txn, txn.cursor() as cursor:
            cursor.putmulti(cells)

    def scan(self) -> int:
        size = 0
        with self.environment.begin() as txn, txn.cursor() as cursor:
            for _, value in cursor:
                size += len(value)
        return size


def seal(store: StateStore, epoch: int, cells: Cells) -> None:
    batch = WriteBatch()
    batch.put_many(cells)
    store.seal(Epoch.from_ms(epoch), batch)


def scan(store: StateStore) -> int:
    size = 0
    with store.snapshot() as view:
        for _, value in view.scan():
            size += len(value)
    return size


def sealing(kind: str, epochs: int, make: Any) -> list[Figure]:
    """Median of the epochs, in turns, so that one slow sync of the disk decides nothing."""
    with scratch() as place, progress(f"sealing {kind}"):
        bare, store = Bare(place), open_writer(place / "store")
        times: tuple[list[float], list[float]] = ([], [])
        for epoch in range(1, epochs + 1):
            cells = make(epoch)
            first, second = (bare.seal, cells), (lambda c, e=epoch: seal(store, e, c), cells)
            for slot, (job, argument) in enumerate((first, second)):
                start = time.perf_counter()
                job(argument)
                times[slot].append(time.perf_counter() - start)
        bound, value = (ROWS / statistics.median(taken) for taken in times)
        figures = [Figure(f"seal epochs of 10 000 rows, {kind}", value, bound, 0.7, "higher", "rows/s")]
        sizes: set[int] = set()
        taken = interleaved(5, lambda: sizes.add(bare.scan()), lambda: sizes.add(scan(store)))
        assert len(sizes) == 1, "both must hold the same bytes"
        count = epochs * (ROWS if kind == "one row per key" else VNODES)
        figures.append(Figure(f"scan, {kind}", count / taken[1], count / taken[0], 0.7, "higher", "keys/s"))
        store.close()
        bare.environment.close()
    return figures


READER = """
import sys, time
from headwater.state import open_reader
reader, last = open_reader(sys.argv[1]), 0
print("ready", flush=True)
while True:
    last = reader.wait_for_epoch(last, 10)
    seen = time.clock_gettime(time.CLOCK_MONOTONIC)
    if last is None:
        break
    with reader.snapshot() as view:
        print(seen, view.get(b"sealed").decode(), flush=True)
"""


def visibility(rounds: int) -> Figure:
    """Time from the return of a seal until another process has seen its epoch."""
    with scratch() as place, progress("visibility in another process"):
        store = open_writer(place / "store")
        seal(store, 1, [(b"sealed", b"0")])
        child = subprocess.Popen(
            [sys.executable, "-c", READER, str(place / "store")], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        child.stdout.readline()
        delays = []
        for epoch in range(2, rounds + 2):
            time.sleep(random.uniform(0.005, 0.05))
            seal(store, epoch, [(b"sealed", str(epoch).encode())])
            sealed = time.clock_gettime(time.CLOCK_MONOTONIC)
            seen, number = child.stdout.readline().split()
            assert int(number) == epoch
            delays.append(max(0.0, float(seen) - sealed) * 1000)
        child.kill()
        child.wait()
        child.stdout.close()
        store.close()
    worst = sorted(delays)[int(len(delays) * 0.99)]
    return Figure("a reader process sees a sealed epoch, p99", worst, 50.0, 1.0, "lower", "ms")


def object_store(epochs: int) -> list[Figure]:
    """The object-store engine on a local directory, against the bare SlateDB binding (no goal: for comparison)."""
    import asyncio

    from slatedb import uniffi as slate

    import headwater.state.engines.slate

    assert headwater.state.engines.slate.slate is slate
    cells = {epoch: arrow_chunks(epoch) for epoch in range(1, epochs + 1)}

    async def bare(place: Path) -> float:
        builder = slate.ObjectStoreBuilder(slate.ObjectStoreType.LOCAL)
        builder.with_config("local_path", str(place))
        db = await slate.DbBuilder("bare", builder.build()).build()
        times = []
        for epoch in cells:
            start = time.perf_counter()
            writes = slate.WriteBatch()
            for key, value in cells[epoch]:
                writes.put(key, bytes(value))
            await db.write(writes)
            await db.flush()
            times.append(time.perf_counter() - start)
        await db.shutdown()
        return statistics.median(times)

    with scratch() as place, progress("object store"):
        bound = asyncio.run(bare(place))
        times = []
        with open_writer(f"slatedb+file://{place}/store") as store:
            for epoch in cells:
                start = time.perf_counter()
                seal(store, epoch, cells[epoch])
                times.append(time.perf_counter() - start)
    value = ROWS / statistics.median(times)
    return [Figure("object store: seal Arrow chunks", value, ROWS / bound, None, "higher", "rows/s")]


def measure(quick: bool) -> list[Figure]:
    epochs = 40 if quick else 150
    return [
        *sealing("one row per key", epochs, small_rows),
        *sealing("Arrow chunks", epochs, arrow_chunks),
        visibility(100 if quick else 400),
        *object_store(20 if quick else 60),
    ]


if __name__ == "__main__":
    main(__doc__, measure)
