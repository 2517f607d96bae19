"""A pipeline under test, as a process or in the session that all tests share, and the mirror that it makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir, suppress
from functools import partial
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.db.backfill.shops import Shop
from tests.servers.postgres import Database
from typer.testing import CliRunner

from headwater import Pipeline
from headwater.cli.main import app
from headwater.pipeline.errors import PipelineFailed

SECONDS = 240.0
"""A busy machine is no failure."""


class RunningPipeline:
    """A pipeline in *folder*; it can be run, asked and killed as a person would."""

    def __init__(self, folder: Path, database: Database | Shop, tables: str, more: str = "") -> None:
        self.folder, self.database = folder, database
        self._process: subprocess.Popen[bytes] | None = None
        self._mirrors: dict[str, tuple[object, list[tuple[Any, ...]]]] = {}
        (folder / "pipeline.toml").write_text(
            f'[pipeline]\nname = "shop"\n[source]\ndsn_env = "SHOP_DSN"\ntables = {tables}\nheartbeat_seconds = 0.5\n'
            f'[spark]\nmaster = "local[2]"\n[[sink]]\nkind = "delta"\npath = "lake"\n{more}\n'
        )

    def _command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        environment = os.environ | {"SHOP_DSN": self.database.dsn, "COLUMNS": "200"}
        return [sys.executable, "-m", "headwater.cli.main", *arguments], environment

    def start(self) -> None:
        command, environment = self._command("run", "--json")
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=out, stderr=err, start_new_session=True, umask=0
            )

    def headwater(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command, beside the run."""
        command, environment = self._command(*arguments)
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )

    def ask(self, *arguments: str) -> str:
        """What a command that succeeds prints; in this process, as starting one costs more than most commands."""
        with chdir(self.folder):
            done = CliRunner(env={"SHOP_DSN": self.database.dsn}).invoke(app, [*arguments])
        assert done.exit_code == 0, done.stdout + done.stderr + repr(done.exception)
        return done.stdout

    def status(self) -> dict[str, Any]:
        """As the run told last."""
        lines = (self.folder / "out").read_bytes().split(b"\n")
        found: dict[str, Any] = json.loads(lines[-2]) if len(lines) > 1 else {"sinks": [], "state": ""}
        return found

    def table(self, name: str) -> dict[str, Any]:
        found = [one for sink in self.status()["sinks"] for one in sink["tables"] if one["name"] == name]
        return found[0] if found else {"phase": "", "rows": 0, "paused": False}

    def check(self) -> None:
        """:raises AssertionError: it does not run."""
        assert self._process is not None
        assert self._process.poll() is None, self.complaints()

    def wait_for(self, done: Callable[[], Any], seconds: float = SECONDS) -> None:
        end = time.monotonic() + seconds
        while not done():
            self.check()
            assert time.monotonic() < end, f"waited {seconds} s: {self.status()}"
            time.sleep(0.1)

    def wait_until_equal(self, *tables: str) -> None:
        """Until each mirror is its table; the source must be at rest."""
        for table in tables:
            expected = sorted(self.database.execute(f"SELECT id, name FROM {table}"))
            self.wait_for(partial(self._equals, table, expected))

    def _equals(self, table: str, expected: list[tuple[Any, ...]]) -> bool:
        return self.mirror(table) == expected

    def mirror(self, table: str) -> list[tuple[Any, ...]]:
        path = self.folder / "lake" / table
        if not (path / "_delta_log").exists():
            return []
        found = DeltaTable(str(path))
        at = (found.version(), found.file_uris())
        if table not in self._mirrors or self._mirrors[table][0] != at:  # who asks again and again reads it once
            rows = found.to_pyarrow_table(columns=["id", "name"])
            self._mirrors[table] = (at, sorted(zip(rows["id"].to_pylist(), rows["name"].to_pylist(), strict=True)))
        return self._mirrors[table][1]

    def column(self, table: str, name: str) -> list[Any]:
        """The values of a column; none before the mirror has it."""
        found = DeltaTable(str(self.folder / "lake" / table))
        has_it = name in found.schema().to_arrow().names
        return found.to_pyarrow_table(columns=[name])[name].to_pylist() if has_it else []

    def complaints(self) -> str:
        log = self.folder / "headwater/shop/logs/spark.log"
        return (self.folder / "err").read_text() + (log.read_text()[-2000:] if log.exists() else "")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def children(self) -> list[int]:
        """All processes that the run has started, and theirs; the run itself first."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def named(self, words: bytes) -> list[int]:
        """Those of them whose command line has *words*."""
        return [pid for pid in self.children() if words in _command_line(pid)]

    def stop(self, how: signal.Signals = signal.SIGINT) -> int:
        """As Ctrl-C does it: the whole group of processes hears of it. Its exit code."""
        assert self._process is not None
        os.killpg(self.pid, how)
        return self._process.wait(SECONDS)

    def wait(self) -> int:
        """Until it ends by itself; its exit code."""
        assert self._process is not None
        return self._process.wait(SECONDS)

    def kill9(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill9()


class SessionPipeline(RunningPipeline):
    """One that runs in this process, in the session *spark*: who does not kill it needs no start of Spark for it."""

    def __init__(self, folder: Path, database: Database | Shop, tables: str, more: str, spark: SparkSession) -> None:
        super().__init__(folder, database, tables, more)
        self._spark = spark
        self._pipeline = Pipeline.from_toml(folder / "pipeline.toml")

    def start(self) -> None:
        self._pipeline.start(self._spark)

    def configure(self, edit: Callable[[str], str]) -> None:
        """Change the file of the pipeline, which does not run."""
        path = self.folder / "pipeline.toml"
        path.write_text(edit(path.read_text()))
        self._pipeline = Pipeline.from_toml(path)

    def status(self) -> dict[str, Any]:
        return self._pipeline.status().to_json()

    def check(self) -> None:
        assert self._pipeline.is_running, self.status()

    def wait_for_end(self) -> None:
        """Until it has failed."""
        with suppress(PipelineFailed):
            assert self._pipeline.wait(SECONDS), self.status()

    def end(self) -> None:
        """:raises PipelineFailed: it had failed."""
        self._pipeline.stop()

    def close(self) -> None:
        if self._pipeline.is_running:
            with suppress(PipelineFailed):  # the test tells why
                self.end()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def are_gone(pids: list[int], seconds: float = 30.0) -> bool:
    """Whether all processes end within *seconds*."""
    end = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
