"""A capture on a disk that is really full: it waits, says why, goes on when there is room, and has each row once."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.crash.capture.capture_process import SECONDS, wait_for
from tests.db.capture.running import RunningCapture
from tests.servers.postgres import Database
from tests.small_disk import SmallDisk, small_disk

from headwater.sources.postgres.offset import Lsn

_SLOT = "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = 'headwater'"


class CaptureOnDisk:
    """``headwater capture`` of ``public.t``, with store and spill on *disk*."""

    def __init__(self, disk: SmallDisk, database: Database, folder: Path) -> None:
        self._disk, self._database, self._folder = disk, database, folder
        self._told = folder / "capture.json"
        program = str(Path(sys.executable).with_name("headwater"))
        command = disk.command(program, "capture", database.dsn, "--json", "--table", "t", "--epoch-ms", "50")
        with self._told.open("wb") as told, (folder / "capture.said").open("wb") as said:
            self.process = subprocess.Popen([*command, "--store", str(disk.path / "store")], stdout=told, stderr=said)

    @property
    def said(self) -> str:
        return (self._folder / "capture.said").read_text()

    def facts(self) -> dict[str, Any]:
        """The newest line that it told."""
        assert self.process.poll() is None, self.said
        whole = self._told.read_text().rpartition("\n")[0]
        newest: dict[str, Any] = json.loads(whole.rpartition("\n")[2] or "{}")
        return newest

    def wait_for_rows(self, count: int) -> None:
        wait_for(lambda: self.facts().get("rows", 0) >= count, f"{count} rows")

    def wait_until_it_waits(self) -> str:
        """Why it does."""
        wait_for(lambda: self.facts()["state"] == "waiting", "the capture to notice that the disk is full")
        return str(self.facts()["last_error"])

    def catch_up(self) -> None:
        target = Lsn.parse(self._database.value("SELECT pg_current_wal_insert_lsn()::text"))
        self._database.execute("SELECT pg_logical_emit_message(true, 'tests', '')")
        wait_for(lambda: self.facts() and int(self._database.value(_SLOT)) >= target, "the capture to catch up")

    def assert_equal(self) -> None:
        """Stop it. Its log is the table, and has no row twice."""
        self.catch_up()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SECONDS) == 0, self.said
        assert "Traceback" not in self.said
        shutil.copytree(self._disk.view / "store", self._folder / "store")
        copy = RunningCapture(self._database, self._folder, ["t"])
        replayed = copy.replayed("public.t").sort_by("id")
        expected = self._database.execute("SELECT id, v FROM t ORDER BY id")
        assert list(zip(replayed["id"].to_pylist(), replayed["v"].to_pylist(), strict=True)) == expected
        copy.assert_once("public.t")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "16m") as made:
        yield made


@pytest.fixture
def capture(disk: SmallDisk, database: Database, tmp_path: Path) -> Iterator[CaptureOnDisk]:
    database.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    running = CaptureOnDisk(disk, database, tmp_path)
    try:
        wait_for(lambda: running.facts().get("state") == "running", "the capture to begin")
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def fill(database: Database, first: int, last: int, size: int = 1) -> None:
    text = f"(SELECT string_agg(md5((n * 7919 + i)::text), '') FROM generate_series(1, {size}) n)"
    database.execute(f"INSERT INTO t SELECT i, {text} FROM generate_series({first}, {last}) i")


def test_a_full_disk_of_the_store_is_waited_out(capture: CaptureOnDisk, disk: SmallDisk, database: Database) -> None:
    fill(database, 1, 100)
    capture.wait_for_rows(100)
    disk.fill()
    fill(database, 101, 200, size=200)
    why = capture.wait_until_it_waits()
    assert f"There is no room for {disk.path}/store: 0 MB are free on its disk." in why
    assert "The capture waits and goes on when there is room." in why
    fill(database, 201, 300)
    disk.make_room()
    fill(database, 301, 400)
    capture.catch_up()
    assert capture.facts()["state"] == "running"
    assert capture.facts()["last_error"] == ""
    capture.assert_equal()


@pytest.mark.soak
def test_a_full_disk_of_the_spill_is_waited_out(capture: CaptureOnDisk, disk: SmallDisk, database: Database) -> None:
    fill(database, 1, 100)
    capture.wait_for_rows(100)
    with database.connect() as session, session.transaction():
        disk.fill()
        session.execute("INSERT INTO t SELECT i, repeat('x', 4000) FROM generate_series(101, 2500) i")
        why = capture.wait_until_it_waits()
        assert f"There is no room in {disk.path}/store/spill" in why
        disk.make_room()
    capture.assert_equal()
