"""Postgres capture: from the server's stream to the durable log, against receiving the same messages and no more.

The table is the ten-column one of change capture; its inserts, updates and deletes are in transactions of 100, or of
one. The bound is ``pg_recvlogical``, which writes the messages to ``/dev/null``, from a slot at the same position, in
turns with the capture. Each is a separate process, timed from the start of the stream to its last change: received
there, durable here. A transaction of millions of rows shows the memory, and an idle time afterwards its cost.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from _harness import Figure, main, progress, scratch
from _servers import Database, PostgresServer
from _tools import pg_recvlogical
from headwater.capture import Capture
from headwater.sources.events import ChangeStream
from headwater.sources.offset import CdcOffset
from headwater.sources.open import open_source
from headwater.sources.postgres.offset import Lsn, PostgresOffset
from headwater.sources.table import SourceTable
from headwater.system.memory import keep_freed_memory

SETTINGS = {"max_wal_size": "8GB", "checkpoint_timeout": "1h", "synchronous_commit": "off", "shared_buffers": "256MB"}
CHILD = "--child"
RECEIVER = "pg_recvlogical to /dev/null"
PER_TRANSACTION = 100
PUBLICATION = "headwater"

TABLES = (
    """
    CREATE TABLE orders (
        id bigint PRIMARY KEY, quantity int, price numeric(18,4), customer text, note text, created timestamptz,
        changed timestamptz, details jsonb, open boolean, token uuid
    )
    """,
    "CREATE TABLE many (id bigint PRIMARY KEY, note text)",
    """
    CREATE PROCEDURE work(rows int, updates int, deletes int, step int) LANGUAGE plpgsql AS $$
    DECLARE first bigint := coalesce((SELECT max(id) FROM orders), 0);
    BEGIN
        FOR i IN 0 .. rows / step - 1 LOOP
            INSERT INTO orders
            SELECT first + n, n % 1000, n * 1.2345, 'customer ' || n % 977, 'a note of usual length for row ' || n,
                   timestamptz '2026-01-01' + n * interval '1.234567 s', now(),
                   jsonb_build_object('kind', n % 7, 'tags', 'a b', 'text', 'hello ' || n), n % 3 > 0, gen_random_uuid()
            FROM generate_series(i * step + 1, (i + 1) * step) n;
            COMMIT;
        END LOOP;
        FOR i IN 0 .. updates / step - 1 LOOP
            UPDATE orders SET quantity = quantity + 1, changed = now()
            WHERE id > first + i * step AND id <= first + (i + 1) * step;
            COMMIT;
        END LOOP;
        FOR i IN 0 .. deletes / step - 1 LOOP
            DELETE FROM orders WHERE id > first + i * step AND id <= first + (i + 1) * step;
            COMMIT;
        END LOOP;
    END $$
    """,
    f"CREATE PUBLICATION {PUBLICATION} FOR TABLE orders, many WITH (publish_via_partition_root = true)",
)


@dataclass(frozen=True, slots=True)
class Work:
    """A stretch of the server's log, and the slot that stands at its beginning."""

    slot: str
    end: Lsn
    changes: int


@dataclass(frozen=True, slots=True)
class Run:
    """What a child measured, in seconds and bytes."""

    seconds: float
    cpu: float
    peak: int = 0
    idle: float = 0.0
    held: int = 0


class Measured:
    """A server with work that can be captured again and again."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._copies = 0
        database.execute(*TABLES)

    def work(self, slot: str, changes: int, *statements: str) -> Work:
        """Create a slot, then changes after it."""
        self._database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        self._database.execute(*statements)
        end = Lsn.parse(self._database.value("SELECT pg_current_wal_insert_lsn()::text"))
        self._database.execute("SELECT pg_logical_emit_message(true, 'bench', '')")  # a commit after the end
        return Work(slot, end, changes)

    def capture(self, work: Work, *, rest: float = 0.0, environment: Mapping[str, str] | None = None) -> Run:
        """Capture in a child process."""
        with self._copy_of(work.slot) as slot, scratch() as folder:
            order = {
                "dsn": self._database.dsn,
                "slot": slot,
                "end": int(work.end),
                "store": str(folder / "store"),
                "rest": rest,
            }
            command: list[Any] = [sys.executable, __file__, CHILD, json.dumps(order)]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | (environment or {})
            )
        return Run(**json.loads(done.stdout))

    def receive(self, work: Work) -> Run:
        """``pg_recvlogical``, without the time in which it starts and connects."""
        seconds, cpu = self._receive(work, str(work.end))
        start, start_cpu = self._receive(work, "0/1")
        return Run(seconds - start, cpu - start_cpu)

    def _receive(self, work: Work, end: str) -> tuple[float, float]:
        with self._copy_of(work.slot) as slot:
            tool, start = pg_recvlogical(self._database, slot, PUBLICATION, end), time.perf_counter()
            cpu = tool.run()
            return time.perf_counter() - start, cpu

    @contextmanager
    def _copy_of(self, slot: str) -> Iterator[str]:
        self._copies += 1
        copy = f"run_{self._copies}"
        self._database.execute(f"SELECT pg_copy_logical_replication_slot('{slot}', '{copy}')")
        yield copy
        while self._database.value(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{copy}'"):
            time.sleep(0.01)
        self._database.execute(f"SELECT pg_drop_replication_slot('{copy}')")

    def forget(self, work: Work) -> None:
        """Let the server remove the log of *work*."""
        self._database.execute(f"SELECT pg_drop_replication_slot('{work.slot}')", "CHECKPOINT")


# -- the child --------------------------------------------------------------------------------------------------------


class Watched:
    """A source that records when its stream began, and when the changes up to *end* were durable."""

    def __init__(self, source: Any, end: int) -> None:
        self._source = source
        self._end = end
        self.started = self.cpu = 0.0
        self.ended = threading.Event()
        self.taken = Run(0.0, 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def claim(self, prepared: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The slot exists, at the beginning of the work, as if the capture had been killed after it created it."""
        return {}

    def begin(self, tables: Sequence[SourceTable], *, resumed: bool) -> Any:
        return self._source.begin(tables, resumed=True)

    def open(self, tables: Sequence[SourceTable], start: CdcOffset, identity: Mapping[str, Any]) -> ChangeStream:
        stream: Any = self._source.open(tables, start, identity)
        acknowledge_source = stream.acknowledge

        def acknowledge(position: CdcOffset) -> None:
            acknowledge_source(position)
            assert isinstance(position, PostgresOffset)
            if position.lsn >= self._end and not self.ended.is_set():
                self.taken = Run(time.perf_counter() - self.started, time.process_time() - self.cpu)
                self.ended.set()

        stream.acknowledge = acknowledge
        self.started, self.cpu = time.perf_counter(), time.process_time()
        return stream  # type: ignore[no-any-return]


def capture(dsn: str, slot: str, end: int, store: Path, rest: float) -> Run:
    """Headwater, as ``headwater capture`` runs it; then *rest* seconds without changes."""
    keep_freed_memory()
    pa.array([""])  # pyarrow loads pandas with its first array
    source = Watched(open_source(dsn, spill=store / "spill", slot=slot), end)
    running = Capture(source, store, ["orders", "many"])
    idle: list[float] = []

    def end_it() -> None:
        source.ended.wait()
        before = time.process_time()
        time.sleep(rest)
        idle.append((time.process_time() - before) / rest if rest else 0.0)
        running.stop()

    watcher = threading.Thread(target=end_it, daemon=True)
    watcher.start()
    running.run()
    watcher.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = open_source(dsn, spill=store / "spill", slot=slot).held_bytes() or 0  # type: ignore[attr-defined]
    return Run(source.taken.seconds, source.taken.cpu, peak, idle[0], held)


def child(order: dict[str, Any]) -> None:
    run = capture(order["dsn"], order["slot"], order["end"], Path(order["store"]), order["rest"])
    print(json.dumps(asdict(run)))


# -- the figures -------------------------------------------------------------------------------------------------------


def best(runs: list[Run]) -> Run:
    return min(runs, key=lambda run: run.seconds)


def in_transactions(measured: Measured, changes: int, turns: int, idle: float) -> list[Figure]:
    """Two thirds inserts, then updates and deletes, in transactions of 100."""
    rows, updates, deletes = changes * 2 // 3, changes * 4 // 15, changes // 15
    statement = f"CALL work({rows}, {updates}, {deletes}, {PER_TRANSACTION})"
    work = measured.work("hundreds", rows + updates + deletes, statement)
    received, captured, python = [], [], []
    for _ in range(turns):
        received.append(measured.receive(work))
        captured.append(measured.capture(work))
        python.append(measured.capture(work, environment={"HEADWATER_PURE": "1"}))
    rest = measured.capture(work, rest=idle)
    measured.forget(work)
    bound, value, pure = best(received), best(captured), best(python)

    def rate(run: Run) -> float:
        return work.changes / run.seconds

    name, unit = "wire to durable log", "changes/s"
    return [
        Figure(f"{name} / {RECEIVER}", rate(value), rate(bound), 0.7, "higher", unit, turns),
        Figure(f"{name}, Python decoder / {RECEIVER}", rate(pure), rate(bound), None, "higher", unit, turns),
        Figure("processor time of the capture / of pg_recvlogical", value.cpu, bound.cpu, None, "lower", "s", turns),
        Figure("processor of an idle capture / one core", rest.idle, 1.0, None, "lower", "cores", 1),
        Figure("log held by the server at the end / one segment", float(rest.held), 16 << 20, None, "lower", "B", 1),
    ]


def one_by_one(measured: Measured, changes: int, turns: int) -> Figure:
    work = measured.work("ones", changes, f"CALL work({changes}, 0, 0, 1)")
    received, captured = [], []
    for _ in range(turns):
        received.append(measured.receive(work))
        captured.append(measured.capture(work))
    measured.forget(work)
    value, bound = work.changes / best(captured).seconds, work.changes / best(received).seconds
    name = f"wire to durable log, one change per transaction / {RECEIVER}"
    return Figure(name, value, bound, None, "higher", "changes/s", turns)


def memory(measured: Measured, rows: int) -> Figure:
    row = "n, 'a note of row ' || n"
    work = measured.work("large", rows, f"INSERT INTO many SELECT {row} FROM generate_series(1, {rows}) n")
    peak = measured.capture(work).peak
    measured.forget(work)
    name = f"memory of the capture for a transaction of {rows / 1e6:g} M rows / 300 MB"
    return Figure(name, float(peak), 300e6, 1.0, "lower", "B", 1)


def measure(quick: bool) -> list[Figure]:
    changes, turns = (120_000, 1) if quick else (750_000, 3)
    with (
        progress("capture from a real Postgres"),
        PostgresServer(settings=SETTINGS) as server,
        server.database() as database,
    ):
        measured = Measured(database)
        figures = in_transactions(measured, changes, turns, 3.0 if quick else 20.0)
        figures.append(one_by_one(measured, 60_000 if quick else 200_000, turns))
        figures.append(memory(measured, 300_000 if quick else 10_000_000))
    return figures


if __name__ == "__main__":
    if CHILD in sys.argv:
        child(json.loads(sys.argv[-1]))
    else:
        main(__doc__, measure)
