"""Citus: a cluster captured and read, beside one Postgres and psql. The cluster is our double of it, not Citus.

The double is a coordinator and two workers, plain Postgres servers, with a table of four shards. Capture is timed from
the opening of the streams to the seal of the epoch that has the last change; its bound is the capture of one Postgres
with the same changes. The snapshot is read into Arrow by two processes, each the shards of one worker; its bound is two
``psql``, which copy the same shards to nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from _harness import Figure, best_in_turns, interleaved, main, progress
from _servers import CitusDouble, Database, PostgresServer, cluster_nodes, log_ends, rows_here
from _timed_capture import Begun, timed_capture
from _tools import Tool, psql, side_by_side
from headwater.sources.citus.offset import CitusOffset, NodePlace
from headwater.sources.offset import CdcOffset
from headwater.sources.open import open_source
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable

SETTINGS = {"max_wal_size": "8GB", "checkpoint_timeout": "1h", "synchronous_commit": "off", "shared_buffers": "256MB"}
WORKERS = (1, 2)
COLUMNS = """
    id bigint, quantity int, price numeric(18,4), customer text, note text, created timestamptz, details jsonb,
    open boolean
"""
# in transactions of about 100 changes: inserts, updates of two fifths of them, deletes of a tenth
WORK = """
CREATE PROCEDURE work(rows bigint, step bigint) LANGUAGE plpgsql AS $$
BEGIN
    FOR low IN 1 .. rows BY step LOOP
        INSERT INTO orders
        SELECT i, i % 1000, i * 1.2345, 'customer ' || i % 977, 'a note of usual length for row ' || i,
               timestamptz '2026-01-01' + i * interval '1.234567 s',
               jsonb_build_object('kind', i % 7, 'tags', 'a b', 'text', 'hello ' || i), i % 3 > 0
        FROM generate_series(low, low + step - 1) i WHERE {here};
        COMMIT;
    END LOOP;
    FOR low IN 1 .. rows * 2 / 5 BY step LOOP
        UPDATE orders SET quantity = quantity + 1 WHERE id >= low AND id < low + step;
        COMMIT;
    END LOOP;
    FOR low IN 1 .. rows / 10 BY step LOOP
        DELETE FROM orders WHERE id >= low AND id < low + step;
        COMMIT;
    END LOOP;
END $$
"""
PER_TRANSACTION = 100


@dataclass(frozen=True, slots=True)
class Bench:
    """A source whose slots stand before the changes, which end at *end*."""

    dsn: str
    begun: Begun
    end: CdcOffset
    changes: int

    def capture(self) -> float:
        """Seconds until all of it is durable. Nothing is acknowledged, so that it can be done again."""
        return timed_capture(self.dsn, "orders", self.begun, self.end, self.changes).seconds


def begun(dsn: str) -> Begun:
    source = open_source(dsn, spill=Path("unused"))
    made = source.begin(source.tables(["orders"]), resumed=False)
    source.close()
    return made


def of_cluster(double: CitusDouble, rows: int, changes: int) -> Bench:
    double.distribute("orders", COLUMNS)
    start = begun(double.dsn)

    def work(group: int) -> None:
        step = PER_TRANSACTION * len(WORKERS)
        double.execute(group, WORK.format(here=rows_here(double, "orders", group)), f"CALL work({rows}, {step})")

    in_parallel(*(lambda group=group: work(group) for group in WORKERS))
    ends = {group: NodePlace(PostgresOffset.at(lsn)) for group, lsn in log_ends(double).items()}
    for group in double.servers:
        double.execute(group, "SELECT pg_logical_emit_message(true, 'bench', '')")  # a commit after the end
    return Bench(double.dsn, start, CitusOffset(ends), changes)


def of_one(database: Database, rows: int, changes: int) -> Bench:
    database.execute(f"CREATE TABLE orders ({COLUMNS}, PRIMARY KEY (id))", WORK.format(here="true"))
    start = begun(database.dsn)
    database.execute(f"CALL work({rows}, {PER_TRANSACTION})")
    end = int(database.value("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint::text"))
    database.execute("SELECT pg_logical_emit_message(true, 'bench', '')")
    return Bench(database.dsn, start, PostgresOffset.at(end), changes)


def in_parallel(*jobs: Callable[[], None]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read_parts(dsn: str, table: SourceTable, parts: Sequence[KeyRange], snapshot: str) -> int:
    """What a task reads: some shards, into Arrow, thrown away."""
    source = open_snapshots(dsn)
    return sum(batch.num_rows for part in parts for batch in source.read(table, SplitKind.HEAP, part, snapshot))


def snapshots(double: CitusDouble, turns: int) -> tuple[float, float, int]:
    """Seconds of our snapshot, seconds of psql, and the rows."""
    source = open_source(double.dsn, spill=Path("unused"))
    (table,) = source.tables(["orders"])
    source.close()
    shards = double.tables["orders"].shards
    rows = len(double.rows("orders"))

    def copy(group: int) -> Tool:
        owned = [shard for shard, owner in shards.items() if owner == group]
        worker = Database(double.servers[group], double.database)
        return psql(worker, *(f"\\copy orders_{shard} to /dev/null csv" for shard in owned))

    def copied() -> None:
        side_by_side(*map(copy, WORKERS))

    with ProcessPoolExecutor(len(WORKERS), mp_context=get_context("spawn")) as pool:
        list(pool.map(read_parts, [double.dsn] * 2, [table] * 2, [[], []], [""] * 2))

        def read() -> None:
            snapshot = open_snapshots(double.dsn).export()
            try:
                splits = snapshot.plan(table, split_rows=10**6).splits  # by shard, those of a node side by side
                half = len(splits) // 2
                parts = [[split.range for split in some] for some in (splits[:half], splits[half:])]
                found = pool.map(read_parts, [double.dsn] * 2, [table] * 2, parts, [snapshot.name] * 2)
                assert sum(found) == rows
            finally:
                snapshot.close()

        ours, bound = interleaved(turns, read, copied)
    return ours, bound, rows


def measure(quick: bool) -> list[Figure]:
    rows, turns = (150_000, 1) if quick else (1_000_000, 3)
    changes = rows + rows * 2 // 5 + rows // 10
    with progress("a double of a Citus cluster, and one Postgres"), ExitStack() as stack:
        double = stack.enter_context(cluster_nodes(1 + len(WORKERS), SETTINGS))
        server = stack.enter_context(PostgresServer(settings=SETTINGS))
        database = stack.enter_context(server.database())
        cluster, one = of_cluster(double, rows, changes), of_one(database, rows, changes)
        ours, alone = best_in_turns(turns, cluster.capture, one.capture)
        shard, owner = next(iter(double.tables["orders"].shards.items()))
        double.move("orders", shard, next(group for group in WORKERS if group != owner))
        merged = min(cluster.capture() for _ in range(turns))
        read, copied, left = snapshots(double, turns)
    return [
        Figure(
            "capture of three nodes (a double of Citus) / of one Postgres, same changes",
            changes / ours,
            changes / alone,
            None,
            "higher",
            "changes/s",
            turns,
        ),
        Figure(
            "the same when a shard has moved since: merged by the times of commits / when none has",
            changes / merged,
            changes / ours,
            None,
            "higher",
            "changes/s",
            turns,
        ),
        Figure(
            "snapshot of shards on two workers (a double of Citus) into columns / two \\copy of them",
            left / read,
            left / copied,
            None,
            "higher",
            "rows/s",
            turns,
        ),
    ]


if __name__ == "__main__":
    main(__doc__, measure)
