"""A table that is added begins where that was asked for, also when the capture is killed just after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.crash.capture.capture_process import CaptureProcess, wait_for
from tests.crash.capture.shop import rows
from tests.servers.sqlserver import AnySqlServer, start_sqlserver, track

from headwater.capture import SourceState, TableState
from headwater.log_store import sealer
from headwater.sources.sqlserver.offset import Lsn, SqlServerOffset
from headwater.state import open_reader

KNOWN, ADDED = "shop.orders", "shop.late"


class SqlServerProcess(CaptureProcess):
    """One capture of tables of *server*."""

    def __init__(self, server: AnySqlServer, folder: Path, tables: Sequence[str], name: str) -> None:
        self._server = server
        super().__init__(server, folder, tables, name)

    def catch_up(self) -> None:
        target = SqlServerOffset(Lsn(self._server.last_change()))
        wait_for(lambda: self.runs() and (offset := self.offset()) is not None and offset >= target, "the capture")


def test_a_capture_instance_that_is_newer_than_the_sealed_position_is_followed_after_a_kill(tmp_path: Path) -> None:
    with start_sqlserver() as server:
        server.execute("CREATE TABLE shop.orders (id int NOT NULL PRIMARY KEY)")
        track(server, "orders")
        before = SqlServerProcess(server, tmp_path, [KNOWN], "before")
        before.start()
        before.wait_until_it_reads()
        server.execute("INSERT INTO shop.orders VALUES (1)")
        before.catch_up()
        before.stop()
        server.execute(*(f"INSERT INTO shop.orders VALUES ({number})" for number in range(2, 20)))
        server.execute("CREATE TABLE shop.late (id int NOT NULL PRIMARY KEY)")
        track(server, "late")
        capture = SqlServerProcess(server, tmp_path, [KNOWN, ADDED], "capture")
        try:
            capture.start(armed=f"{sealer.AFTER_SEAL}=kill@1")
            capture.killed_by_failpoint()
            with open_reader(capture.store) as reader, reader.snapshot() as view:
                assert ADDED in SourceState.read(view)[1]  # the seal that we were killed after has it
            server.execute("INSERT INTO shop.late VALUES (100)")
            capture.start()
            capture.catch_up()
            assert [row["id"] for row in rows(capture.store, ADDED, "id")] == [100]
            assert [row["id"] for row in rows(capture.store, KNOWN, "id")] == list(range(1, 20))
            with open_reader(capture.store) as reader, reader.snapshot() as view:
                assert SourceState.read(view)[1][ADDED].state is TableState.ACTIVE
            capture.stop()
        finally:
            capture.close()
