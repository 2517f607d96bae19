"""Commits that the capture job does not show yet, though it looks: on the double, which can be made to hold them back.

As in an availability group whose replicas are behind: the job finds nothing, and what lies behind is no proof of it.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.db.sqlserver.running import TABLE, SqlServerCapture, SqlServerDelivering, create, running, stored_offset
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.control.command import RecaptureSource
from headwater.control.request import Request, leave
from headwater.sources.errors import CommitsCameLate, SourceBusy
from headwater.sources.events import Boundary
from headwater.sources.open import open_source
from headwater.sources.snapshots import open_snapshots
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.log_watch import settled_end
from headwater.sources.sqlserver.offset import Lsn, SqlServerOffset


def insert(double: SqlServerDouble, number: int) -> None:
    double.execute(f"INSERT INTO shop.orders VALUES ({number}, 'a', 1, NULL)")


def wait_for_looks(double: SqlServerDouble, capture: SqlServerCapture) -> None:
    """Until the job has looked, and the capture has seen it, more often than anybody needs to believe it."""
    before = double.engine.empty_scans
    capture.wait_for(lambda: double.engine.empty_scans > before + 25)


def test_a_commit_that_is_shown_before_the_sealed_position_ends_the_capture(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    capture = SqlServerCapture(double, tmp_path, [TABLE])
    capture.start()
    insert(double, 1)
    capture.catch_up()
    double.engine.is_held_back = True
    insert(double, 2)
    capture.reach_the_end()
    double.engine.is_held_back = False
    failure = capture.wait_for_end()
    assert isinstance(failure, CommitsCameLate)
    assert failure.next_step is not None
    assert "headwater resnapshot" in failure.next_step
    assert isinstance(capture.fails_to_start(), CommitsCameLate)  # the store knows what was told
    assert [row["id"] for row in capture.rows(TABLE)] == [1]
    leave(capture.store, Request(RecaptureSource()))
    capture.start()
    query = SqlServerDelivering(capture, TABLE)
    query.run_until(query.planner.is_history_done)
    insert(double, 3)
    query.finish()
    query.assert_equal()
    assert len(query.sink.mirror[TABLE]) == 3
    query.close()
    capture.stop()


def test_an_entry_without_changes_at_the_sealed_position_is_no_late_commit(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    capture = SqlServerCapture(double, tmp_path, [TABLE])
    capture.start()
    insert(double, 1)
    capture.reach_the_end()
    double.engine.note_time()
    wait_for_looks(double, capture)
    insert(double, 2)
    capture.catch_up()
    double.engine.note_time()
    capture.stop()
    capture.start()
    insert(double, 3)
    capture.catch_up()
    assert [row["id"] for row in capture.rows(TABLE)] == [1, 2, 3]
    capture.stop()


def test_a_commit_that_is_shown_before_a_position_that_is_not_sealed_is_told(
    double: SqlServerDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(double)
    monkeypatch.setattr("headwater.capture.session._MOVED_SECONDS", 3600.0)
    capture = SqlServerCapture(double, tmp_path, [TABLE])
    capture.options = replace(capture.options, heartbeat_seconds=3600.0)
    capture.start()
    insert(double, 1)
    capture.catch_up()
    double.engine.is_held_back = True
    insert(double, 2)
    wait_for_looks(double, capture)
    double.engine.is_held_back = False
    capture.assert_equal(TABLE)
    capture.assert_once(TABLE)
    capture.stop()


def test_what_is_sealed_decides_whether_a_late_commit_is_told_or_an_error(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    for is_sealed, error in ((False, SourceBusy), (True, CommitsCameLate)):
        source = open_source(double.dsn, spill=tmp_path)
        tables = source.tables([TABLE])
        start, identity = source.begin(tables, resumed=False)
        double.engine.is_held_back = True
        insert(double, 10 + is_sealed)
        late = SqlServerOffset(Lsn(double.last_change()))
        stream = source.open(tables, start, identity)
        told = start
        while told < late:
            for event in stream.poll(1.0, stop_at_boundary=True):
                assert isinstance(event, Boundary)
                told = event.position
        assert isinstance(told, SqlServerOffset)
        assert told.told == start.commit_lsn  # type: ignore[attr-defined]
        if is_sealed:
            stream.acknowledge(told)
        double.engine.is_held_back = False
        double.wait_for_scan()
        with pytest.raises(error):
            stream.poll(1.0, stop_at_boundary=True)
        stream.close()
        source.close()


def test_the_position_goes_no_further_than_the_replicas_have_the_log(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    with running(double, tmp_path, TABLE) as capture:
        insert(double, 1)
        capture.catch_up()
        double.engine.hardened = double.engine.log_end
        insert(double, 2)
        capture.wait_for(lambda: _place(capture) >= (double.engine.hardened or 0))
        wait_for_looks(double, capture)
        assert _place(capture) == double.engine.hardened
        double.engine.hardened = double.engine.log_end
        capture.assert_equal(TABLE)
        capture.assert_once(TABLE)


def _place(capture: SqlServerCapture) -> int:
    offset = stored_offset(capture.store)
    return 0 if offset is None else offset.commit_lsn


def test_the_position_stands_where_nobody_may_see_how_far_the_replicas_are(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    double.engine.hardened = double.engine.log_end
    with running(double, tmp_path, TABLE, dsn=double.dsn_of("reader")) as capture:
        insert(double, 1)
        wait_for_looks(double, capture)
        assert _place(capture) < double.last_change()
        double.engine.hardened = double.engine.log_end
        capture.assert_equal(TABLE)


def test_a_mark_that_a_late_commit_proves_wrong_is_an_error(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    with running(double, tmp_path, TABLE) as capture:
        insert(double, 1)
        capture.catch_up()
        capture.stop()
        double.engine.is_held_back = True
        insert(double, 2)
        with open_snapshots(double.dsn).export() as snapshot:  # type: ignore[attr-defined]
            mark = snapshot.mark
        double.engine.is_held_back = False
        capture.start()
        capture.catch_up()
        first, late = [pa.array([row["_position"]], pa.binary(16)) for row in capture.rows(TABLE)]
        assert mark.contains(first).tolist() == [True]
        with pytest.raises(CommitsCameLate):
            mark.contains(late)


def test_a_job_that_looks_rarely_is_waited_for_longer(double: SqlServerDouble) -> None:
    create(double)
    double.engine.polls, double.engine.agent_runs = 5, False
    with Session(Dsn(double.dsn)) as session:
        started = threading.Timer(0.5, lambda: setattr(double.engine, "agent_runs", True))
        started.start()
        assert settled_end(session, 0.1).commit_lsn > 0
        double.engine.polls, double.engine.agent_runs = 0, False
        insert(double, 1)
        with pytest.raises(SourceBusy, match="in time"):
            settled_end(session, 0.1)
