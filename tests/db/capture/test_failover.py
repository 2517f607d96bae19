"""A server that was promoted: the capture goes on there, and again when it is started later."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.capture.running import RunningCapture
from tests.db.conftest import StartPostgres

from headwater.capture import SourceState
from headwater.state import open_reader


@pytest.mark.parametrize("poll", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_capture_that_went_on_after_a_promotion_is_started_again_later(
    start_postgres: StartPostgres, tmp_path: Path, poll: bool
) -> None:
    """Archive recovery of a copy that holds its slot stands for a promoted standby."""
    server = start_postgres()
    with server.database() as database:
        database.execute("CREATE TABLE t (id bigint PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        capture = RunningCapture(database, tmp_path, ["t"], poll=poll)
        capture.start()
        capture.catch_up()
        capture.stop()
        server.stop()
        (server.data / "standby.signal").touch()
        server.start()
        server.promote()
        for key in (2, 3, 4):  # the place that is durable lies after the promotion from the second time on
            database.execute(f"INSERT INTO t VALUES ({key})")
            capture.start()
            capture.catch_up()
            capture.stop()
        assert sorted(row["id"] for row in capture.rows("public.t")) == [2, 3, 4]
        with open_reader(capture.store) as reader, reader.snapshot() as view:
            record, _ = SourceState.read(view)
        assert record is not None
        assert [record.identity[part] for part in ("timeline", "slot")] == [2, "headwater"]
