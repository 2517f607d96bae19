"""Verify over a real database, a real capture and real Delta tables: planted differences are found, motion is none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake
from tests.db.capture.running import RunningCapture, running
from tests.servers.postgres import Database

from headwater.backfill.log_ranges import LogRanges
from headwater.errors import ConflictError, InputError
from headwater.log_store import LogView
from headwater.pipeline.config import configure
from headwater.pipeline.verify import Verification
from headwater.pipeline.verify.check import Findings, Options, check_table
from headwater.pipeline.verify.mirrors import mirror_of
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Mode, Token
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import open_snapshots
from headwater.sources.table import SourceTable
from headwater.state import open_reader

ROWS = 3000
_ALL_TYPES = """
CREATE TABLE t (id bigint, part text COLLATE "C", v text, amount numeric(12,2), huge numeric(50,3), at timestamptz,
  clock time, tags text[], doc jsonb, raw bytea, f float8, u uuid, PRIMARY KEY (id, part))
"""
_FILL = f"""
INSERT INTO t SELECT i, 'p' || i % 7, 'value ' || i, i * 1.25, i * 1e30, now() + i * interval '1 s',
  time '00:00' + i * interval '1 s', ARRAY['a' || i, NULL, 'b'], jsonb_build_object('i', i),
  decode(md5(i::text), 'hex'), CASE WHEN i % 10 = 0 THEN 'NaN' ELSE i / 3.0 END, md5(i::text)::uuid
FROM generate_series(1, {ROWS}) i
"""


class Follower:
    """Delivers the log of a table to a Delta sink, as a query does, in a thread until the end."""

    def __init__(self, captured: RunningCapture, folder: Path, kind: str, mode: Mode) -> None:
        self._captured = captured
        self.sink = open_sink(kind, path=str(folder / "lake"), mode=mode)
        self.path = folder / "lake" / "public.t"
        with open_reader(captured.store) as reader, reader.snapshot() as view:
            self.table = LogRanges(view, ["public.t"]).changes("public.t", 0, view.epoch).table
        self._epoch = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with open_reader(self._captured.store) as reader:
            while not self._stop.is_set():
                with reader.snapshot() as view:
                    shown = LogView.open(view, "public.t")
                    upto = int(shown.sealed)
                    batches = list(shown.read_range(self._epoch, upto))
                    token = Token("q", "b", self._epoch, upto, 0)
                    staged = self.sink.stage_changes(self.table, token, iter(batches), None)
                    self.sink.commit(self.table, token, [staged])
                self._epoch = upto
                reader.wait_for_epoch(upto, 0.05)

    def delivered(self, position: CdcOffset, seconds: float) -> bool:
        end = threading.Event()
        timer = threading.Timer(seconds, end.set)
        timer.start()
        try:
            while not end.is_set():
                with open_reader(self._captured.store) as reader, reader.snapshot() as view:
                    record, epoch = LogRanges(view, []).record, int(view.epoch)
                if record is not None and record.offset >= position and self._epoch >= epoch:
                    return True
                end.wait(0.02)
        finally:
            timer.cancel()
        return False

    def check(self, table: SourceTable | None = None, **options: int) -> Findings:
        source = open_snapshots(self._captured.database.dsn)
        chosen = Options(split_rows=500, rounds=10, keys=options.get("keys", 0))
        return check_table(source, table or self.table, mirror_of(self.sink), self.delivered, chosen)


@contextlib.contextmanager
def following(database: Database, folder: Path, kind: str = "delta", mode: Mode = Mode.MIRROR) -> Iterator[Follower]:
    database.execute(_ALL_TYPES)
    with running(database, folder, "public.t") as captured:
        database.execute(_FILL)
        captured.catch_up()
        with Follower(captured, folder, kind, mode) as follower:
            yield follower


def settle(follower: Follower, database: Database) -> None:
    with contextlib.closing(open_snapshots(database.dsn).export()) as snapshot:
        assert follower.delivered(snapshot.mark.high, 30)


@pytest.mark.parametrize(("kind", "mode"), [("delta", Mode.MIRROR), ("delta", Mode.CHANGES), ("parquet", Mode.CHANGES)])
def test_every_type_is_equal_on_both_sides(newest_postgres: Database, tmp_path: Path, kind: str, mode: Mode) -> None:
    with following(newest_postgres, tmp_path, kind, mode) as follower:
        newest_postgres.execute("UPDATE t SET v = v || '!' WHERE id % 3 = 0", "DELETE FROM t WHERE id % 5 = 0")
        newest_postgres.execute("UPDATE t SET id = -id WHERE id % 7 = 0")
        settle(follower, newest_postgres)
        found = follower.check()
    assert found.is_right, found
    assert (found.source_rows, found.mirror_rows, found.rounds) == (ROWS * 4 // 5, ROWS * 4 // 5, 0)


def test_a_difference_of_each_kind_is_found(newest_postgres: Database, tmp_path: Path) -> None:
    with following(newest_postgres, tmp_path) as follower:
        settle(follower, newest_postgres)
        mirror = DeltaTable(follower.path)
        rows = mirror.to_pyarrow_table()
        doubled = rows.filter(rows.column("id").to_numpy() == 2345)
        mirror.update({"amount": "0"}, predicate="id = 17")
        mirror.delete("id in (18, 2900)")
        extra = doubled.set_column(0, "id", [[99_999]])
        write_deltalake(follower.path, doubled, mode="append")
        write_deltalake(follower.path, extra, mode="append")
        found = follower.check(keys=10)
        newest_postgres.execute("UPDATE t SET v = v || '?' WHERE id in (17, 18)")
        settle(follower, newest_postgres)
        mended = follower.check()
    assert (found.mismatches, found.missing, found.extra, found.doubled) == (1, 2, 1, 1)
    assert found.unsettled == 0
    assert not found.is_right
    assert sorted(key["id"] for key in found.keys) == [17, 18, 2345, 2900, 99_999]
    assert 0 < len(found.ranges) < 7
    assert (mended.mismatches, mended.missing) == (0, 1)


def test_nothing_is_found_while_a_writer_goes_on(newest_postgres: Database, tmp_path: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        number = 0
        with newest_postgres.connect() as session:
            while not stop.wait(0.002):
                number += 1
                session.execute("UPDATE t SET v = %s WHERE id = %s", [str(number), number * 37 % ROWS])
                session.execute("UPDATE t SET id = %s WHERE id = %s", [ROWS + number, number * 11 % ROWS])
                session.execute("UPDATE t SET f = %s WHERE id = 1", [number])
                session.execute("DELETE FROM t WHERE id = %s", [number * 13 % ROWS])

    writer = threading.Thread(target=write, daemon=True)
    with following(newest_postgres, tmp_path) as follower:
        settle(follower, newest_postgres)
        writer.start()
        try:
            right = [follower.check() for _ in range(3)]
            DeltaTable(follower.path).update({"v": "'planted'"}, predicate="id = 2")
            wrong = follower.check()
        finally:
            stop.set()
            writer.join(30)
        settle(follower, newest_postgres)
        rested = follower.check()
    assert [found.differences for found in right] == [0, 0, 0], right
    assert any(found.rounds > 0 for found in right)
    assert wrong.mismatches <= 1
    assert rested.mismatches == wrong.mismatches
    assert rested.unsettled == 0


def test_a_table_without_a_usable_key_is_compared_row_by_row(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute("CREATE TABLE t (a int, b text)", "ALTER TABLE t REPLICA IDENTITY FULL")
    with running(newest_postgres, tmp_path, "public.t") as captured:
        newest_postgres.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 200) i")
        captured.catch_up()
        with Follower(captured, tmp_path, "delta", Mode.MIRROR) as follower:
            settle(follower, newest_postgres)
            assert follower.check().is_right
            DeltaTable(follower.path).delete("a = 3")
            found = follower.check()
    assert (found.missing, found.differences) == (1, 1)


def test_what_cannot_be_compared_is_said_before_anything_is_read(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY)")
    settings = {
        "pipeline": {"store": str(tmp_path / "store")},
        "source": {"dsn": newest_postgres.dsn, "tables": ["public.t"]},
        "sink": [{"kind": "delta", "path": str(tmp_path / "lake")}],
    }
    with running(newest_postgres, tmp_path, "public.t") as captured:
        captured.catch_up()
        config = configure(settings)
        with pytest.raises(InputError, match=r"no table public\.nowhere"):
            Verification(config, tables=["public.nowhere"])
        with pytest.raises(InputError, match="no sink 'lake'"):
            Verification(config, sinks=["lake"])
        with pytest.raises(ConflictError, match=r"history of public\.t is not in sink 'delta'"):
            Verification(config)
