"""Log store: durable writes and range reads against plain Arrow files, and the memory of a writer nobody reads.

The table is the ten-column one of change capture: keys, numbers, decimals, texts, timestamps, JSON, a uuid. The bounds
are measured in the same run: the same batches as Arrow IPC into one plain file with an fdatasync per epoch, and a
plain Arrow IPC file that holds just the rows of the asked vnodes.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from _harness import Figure, main, progress, scratch
from headwater.log_store.chunk_codec import Compression
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log_view import LogView
from headwater.log_store.writer import KvLogStoreWriter
from headwater.state import StateStore, open_reader, open_writer
from headwater.stream import Chunk, Epoch, EpochPair, VnodeBitmap
from headwater.system.memory import keep_freed_memory

ROWS = 10_000
KEY = ("id",)


def changes(number: int, rows: int = ROWS) -> pa.RecordBatch:
    rng = np.random.default_rng(number)
    texts = [f"customer {n % 997} of the shop" for n in range(rows)]
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array(rng.integers(0, 1 << 40, rows)),
            "quantity": pa.array(rng.integers(0, 1000, rows).astype(np.int32)),
            "amount": pa.array(rng.integers(0, 10**9, rows)).cast(pa.decimal128(19, 0)).cast(pa.decimal128(23, 4)),
            "customer": pa.array(texts),
            "note": pa.array([f"note {n} {n * 7919 % 1000003}" for n in range(rows)]),
            "created": pa.array(rng.integers(0, 10**15, rows)).cast(pa.timestamp("us", "UTC")),
            "changed": pa.array(rng.integers(0, 10**15, rows)).cast(pa.timestamp("us", "UTC")),
            "body": pa.array([json.dumps({"a": n, "b": "x" * 10, "c": n % 7}) for n in range(rows)]),
            "flag": pa.array(rng.integers(0, 2, rows).astype(bool)),
            "token": pa.array([str(uuid.UUID(int=n * (1 << 64) + n)) for n in range(rows)]),
        }
    )


class Written:
    """A log in a store of its own."""

    def __init__(self, place: Path, log_format: int, compression: Compression = Compression.NONE) -> None:
        self.store: StateStore = open_writer(place)
        self.factory = KvLogStoreFactory(self.store, compression=compression)
        self.writer: KvLogStoreWriter = self.factory.writer(
            self.factory.log("orders", changes(0, 1).schema, KEY, log_format)
        )
        self.writer.init(EpochPair(Epoch.from_ms(1), Epoch(0)))

    def epoch(self, chunk: Chunk) -> None:
        ended = self.writer.epoch
        self.writer.write_chunk(chunk)
        self.writer.end_epoch(ended.next())
        self.factory.sealer.seal_in_background(ended)  # while the next epoch is made; each has its own commit and sync

    def close(self) -> None:
        self.factory.sealer.wait()
        self.factory.close()
        self.store.close()


def plain_epoch(file: int, batch: pa.RecordBatch) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    os.write(file, sink.getvalue())
    os.fdatasync(file)


def writing(epochs: int) -> list[Figure]:
    """Runs of ten epochs by all in turn, the last seal waited for; the median run counts."""
    keep_freed_memory()  # as the capture does; the plain file profits, too
    batches = [changes(number) for number in range(10)]
    chunks = [Chunk.inserts(batch, KEY) for batch in batches]
    names = ("plain", "v2", "v2 lz4", "v1")
    times: dict[str, list[float]] = {name: [] for name in names}
    with scratch() as place, progress("writing epochs of 10 000 rows"):
        file = os.open(place / "plain.arrow", os.O_CREAT | os.O_WRONLY, 0o600)
        logs = {
            "v2": Written(place / "v2", 2),
            "v2 lz4": Written(place / "lz4", 2, Compression.LZ4),
            "v1": Written(place / "v1", 1),
        }
        for number in range(epochs // 10):
            for name in names:
                if name == "v1" and number >= 2:
                    continue  # the slow one need not run as often
                start = time.perf_counter()
                for batch, chunk in zip(batches, chunks, strict=True):
                    if name == "plain":
                        plain_epoch(file, batch)
                    else:
                        logs[name].epoch(chunk)
                if name != "plain":
                    logs[name].factory.sealer.wait()
                times[name].append(time.perf_counter() - start)
        os.close(file)
        for log in logs.values():
            log.close()
    rate = {name: 10 * ROWS / statistics.median(taken) for name, taken in times.items()}
    plain = "plain file with fdatasync"
    return [
        Figure(f"v2 write, durable per epoch / {plain}", rate["v2"], rate["plain"], 0.5, "higher", "rows/s"),
        Figure("v2 write / v1 write", rate["v2"], rate["v1"], 3.0, "higher", "rows/s"),
        Figure(f"v2 write with lz4 / {plain}", rate["v2 lz4"], rate["plain"], None, "higher", "rows/s"),
    ]


def busy_seconds(times: int, *jobs: Callable[[], object]) -> list[float]:
    """Least processor time of each job, in turns: these read from memory alone, and take turns with other programs."""
    least = [float("inf")] * len(jobs)
    for _ in range(times):
        for place, job in enumerate(jobs):
            start = time.process_time()
            job()
            least[place] = min(least[place], time.process_time() - start)
    return least


def reading(epochs: int) -> Figure:
    """One quarter of the vnodes, as one of four Spark tasks would; the plain file has the same columns and batches."""
    quarter = VnodeBitmap.from_ranges([range(64, 128)], 256)
    with scratch() as place, progress("reading a quarter of the vnodes"):
        log = Written(place / "store", 2)
        for number in range(epochs):
            log.epoch(Chunk.inserts(changes(number), KEY))
        log.factory.sealer.wait()
        upto = log.store.committed_epoch()
        log.close()
        with open_reader(str(place / "store")) as store:  # once per process, as Spark's workers are used again

            def value() -> pa.Table:
                with store.mapped_snapshot() as view:
                    return pa.Table.from_batches(LogView.open(view, "orders").read_range(Epoch(0), upto, quarter))

            def bound() -> pa.Table:
                with pa.OSFile(str(place / "quarter.arrow"), "rb") as source:
                    return pa.ipc.open_file(source).read_all()

            rows = value()
            with pa.ipc.new_file(str(place / "quarter.arrow"), rows.schema) as plain:
                plain.write_table(rows)
            assert bound().equals(rows), "both must read the same"
            count = rows.num_rows
            del rows
            best = busy_seconds(60, bound, value)
    return Figure(
        "v2 range read of a quarter of the vnodes / Arrow file of just those rows",
        count / best[1],
        count / best[0],
        0.5,
        "higher",
        "rows/s",
    )


UNREAD = "--unread"


def unread(rows: int) -> None:
    """In a process of its own: write *rows* rows that nobody reads, and print by how many bytes it grew."""
    with scratch() as place:
        log = Written(place / "store", 2)
        chunks = [Chunk.inserts(changes(number), KEY) for number in range(4)]
        for chunk in chunks:
            log.epoch(chunk)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for number in range(rows // ROWS):
            log.epoch(chunks[number % len(chunks)])
            if number % 100 == 99:
                log.store.statistics()
        grown = _own_memory() - before
        log.close()
    print(max(0, grown))


def _own_memory() -> int:
    """Anonymous memory and what the process mapped for itself; the pages of the store's file are the kernel's cache."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shared = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            shared = int(line.split()[1]) * 1024
    return peak - shared


def memory(rows: int) -> Figure:
    with progress(f"memory of a writer while {rows:,} rows pass unread"):
        command: list[Any] = [sys.executable, __file__, UNREAD, str(rows)]
        grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    name = f"growth of a writer while {rows // 1_000_000} M rows pass with no consumer"
    return Figure(name, float(grown), 200e6, 1.0, "lower", "B")


def measure(quick: bool) -> list[Figure]:
    return [*writing(40 if quick else 150), reading(60), memory(1_000_000 if quick else 10_000_000)]


if __name__ == "__main__":
    if UNREAD in sys.argv:
        unread(int(sys.argv[-1]))
    else:
        main(__doc__, measure)
