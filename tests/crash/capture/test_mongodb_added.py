"""A collection that is added begins where that was asked for, also when the capture is killed just after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.crash.capture.capture_process import CaptureProcess, wait_for
from tests.crash.capture.shop import rows
from tests.db.mongodb.conftest import started_or_skipped
from tests.db.mongodb.running import end_of_log
from tests.servers.mongodb import MongoServer

from headwater.capture import SourceState, TableState
from headwater.log_store import sealer
from headwater.state import open_reader

KNOWN, ADDED = "shop.orders", "shop.notes"


class MongoProcess(CaptureProcess):
    """One capture of collections of *server*."""

    def __init__(self, server: MongoServer, folder: Path, tables: Sequence[str], name: str) -> None:
        self._server = server
        super().__init__(server, folder, tables, name)

    def catch_up(self) -> None:
        target = end_of_log(self._server)
        wait_for(lambda: self.runs() and (offset := self.offset()) is not None and offset >= target, "the capture")


def test_what_a_collection_was_before_it_was_added_stays_untold_after_a_kill(tmp_path: Path) -> None:
    with started_or_skipped() as server:
        shop = server.client.shop
        shop.orders.insert_one({"_id": 1})
        before = MongoProcess(server, tmp_path, [KNOWN], "before")
        before.start()
        before.wait_until_it_reads()
        before.catch_up()
        before.stop()
        # of the log after the place that is durable: another collection of that name, with other keys, that was dropped
        shop.notes.insert_many([{"_id": f"text {number}"} for number in range(20)])
        shop.notes.drop()
        shop.notes.insert_many([{"_id": number} for number in range(20)])
        shop.orders.insert_one({"_id": 2})
        capture = MongoProcess(server, tmp_path, [KNOWN, ADDED], "capture")
        try:
            capture.start(armed=f"{sealer.AFTER_SEAL}=kill@1")
            capture.killed_by_failpoint()
            with open_reader(capture.store) as reader, reader.snapshot() as view:
                _, tables = SourceState.read(view)
            assert ADDED in tables  # the seal that we were killed after has it
            shop.notes.insert_one({"_id": 100})
            capture.start()
            capture.catch_up()
            assert [row["_id"] for row in rows(capture.store, ADDED, "_id")] == [100]
            assert [row["_id"] for row in rows(capture.store, KNOWN, "_id")] == [2]
            with open_reader(capture.store) as reader, reader.snapshot() as view:
                assert SourceState.read(view)[1][ADDED].state is TableState.ACTIVE
            capture.stop()
        finally:
            capture.close()
