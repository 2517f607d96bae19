"""``headwater capture`` as a process of its own, to be killed, stopped and started again over one store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tests.db.capture.running import stored_offset
from tests.servers.postgres import Database

from headwater import failpoints
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.offset import Lsn, PostgresOffset

SECONDS = 120.0
DSN_VARIABLE = "HEADWATER_TEST_SOURCE"


def wait_for(done: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    """:raises AssertionError: it did not come about in time."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


class Addressed(Protocol):
    """A server, a database, a shop: whatever can be captured."""

    @property
    def dsn(self) -> str: ...


class CaptureProcess(ABC):
    """One capture of *tables*; what it says goes to a file, which outlives its lives."""

    def __init__(self, source: Addressed, folder: Path, tables: Sequence[str], name: str = "capture") -> None:
        self._source = source
        self._tables = tables
        self.store = folder / "store"
        self._said = folder / f"{name}.said"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, armed: str = "") -> None:
        """Start it with failpoints *armed*."""
        command = [str(Path(sys.executable).with_name("headwater")), "capture", "--dsn-env", DSN_VARIABLE, "--json"]
        command += ["--store", str(self.store), "--epoch-ms", "50", *arguments]
        for table in self._tables:
            command += ["--table", table]
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {failpoints.VARIABLE: armed, DSN_VARIABLE: self._source.dsn},
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def said(self) -> str:
        """What it wrote to stderr in all its lives."""
        return self._said.read_text()

    def kill9(self) -> None:
        """:raises AssertionError: it had ended by itself."""
        assert self.process.poll() is None, self.said
        self.process.kill()
        assert self.process.wait(SECONDS) == -signal.SIGKILL

    def killed_by_failpoint(self) -> None:
        """:raises AssertionError: it did not come to the failpoint."""
        assert self.process.wait(SECONDS) == -signal.SIGKILL, self.said

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SECONDS) == 0, self.said

    def close(self) -> None:
        """End it however it is."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def offset(self) -> CdcOffset | None:
        """The position that its store holds."""
        return stored_offset(self.store)

    @abstractmethod
    def catch_up(self) -> None:
        """Until all that is committed by now is durable."""

    def wait_until_it_reads(self) -> None:
        """Until it holds a position, or has ended."""
        wait_for(lambda: self.process.poll() is not None or self.offset() is not None, "the capture to begin")

    def peak_megabytes(self) -> float:
        """The most memory that it had so far, as the kernel counts it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(peak) / 1024

    def runs(self) -> bool:
        """:raises AssertionError: it has ended."""
        assert self.process.poll() is None, self.said
        return True


class PostgresProcess(CaptureProcess):
    """One capture of tables of *database*."""

    def __init__(self, database: Database, folder: Path, tables: Sequence[str], name: str = "capture") -> None:
        self._database = database
        super().__init__(database, folder, tables, name)

    def durable(self) -> int:
        """How far the source's log is durable in the store."""
        offset = self.offset()
        if offset is None:
            return 0
        assert isinstance(offset, PostgresOffset)
        return offset.lsn

    def catch_up(self) -> None:
        target = Lsn.parse(self._database.value("SELECT pg_current_wal_insert_lsn()::text"))
        self._database.execute("SELECT pg_logical_emit_message(true, 'tests', '')")  # a commit after all others
        wait_for(lambda: self.runs() and self.durable() >= target, f"the capture to come to {target}")

    def wait_until_it_reads(self) -> None:
        """Until the server sends it the slot's changes."""
        query = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'headwater' AND active"
        with self._database.connect() as session:
            wait_for(lambda: self.runs() and session.execute(query).fetchone() == (1,), "the capture to read its slot")
