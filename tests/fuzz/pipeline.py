"""The pipeline of the fuzzer: the real process, its capture that is killed or kept down, and what it says of itself."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from tests.fuzz.sources import FuzzSource
from tests.spark.pipeline.driven import RunningPipeline

from headwater.backfill.log_ranges import described_tables
from headwater.errors import HeadwaterError
from headwater.pipeline.config import load
from headwater.pipeline.config.sections import SourceSection
from headwater.pipeline.status import read_status
from headwater.pipeline.verify.delivery import QueryDelivery
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import open_snapshots

CAPTURE: Final = b"headwater.spark.capture_child"
CHECK_SECONDS: Final = 1
_PR_SET_PDEATHSIG: Final = 1
_COMMAND = re.compile(r".*headwater ((?:resnapshot|sink|capture|run|resume|log) (?:(?!\. | \()[^\n;`])*)", re.DOTALL)


class FuzzPipeline(RunningPipeline):
    """A pipeline of *tables* into one mirror."""

    def __init__(self, folder: Path, source: FuzzSource, tables: Sequence[str], sink: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.database = folder, source  # type: ignore[assignment]
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None
        self._held = 0
        self._lock = threading.Lock()
        checks = f"schema_check_seconds = {CHECK_SECONDS}\n" if _has_checks() else ""
        names = ", ".join(f'"{table}"' for table in tables)
        (folder / "pipeline.toml").write_text(
            f'[pipeline]\nname = "fuzz"\n[source]\ndsn_env = "SHOP_DSN"\ntables = [{names}]\nheartbeat_seconds = 0.5\n'
            f'{checks}retry_seconds = 2\n[backfill]\ninterval_seconds = 0.5\n[spark]\nmaster = "local[2]"\n'
            f"[[sink]]\n{sink}\n"
        )

    def _command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        command, environment = super()._command(*arguments)
        return command, environment | {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1"}

    def start(self) -> None:
        command, environment = self._command("run")
        with (self.folder / "out").open("ab") as out:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_die_with_us,  # noqa: PLW1509 (one call, that allocates nothing)
            )

    def complaints(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _config(self) -> Any:
        os.environ["SHOP_DSN"] = self._source.dsn
        return load(self.folder / "pipeline.toml")

    def status(self) -> dict[str, Any]:
        """As ``headwater status --json`` prints it."""
        return read_status(self._config()).to_json()

    def tables(self) -> dict[str, dict[str, Any]]:
        return tables_of(self.status())

    def command(self, text: str) -> str | None:
        """Run a command of ``headwater`` that was advised; what it complained of, or ``None``."""
        done = self.headwater(*shlex.split(text))
        if done.returncode == 0:
            return None
        return f"`headwater {text}` ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}"

    def position(self) -> CdcOffset:
        """Where the source is now."""
        with closing(open_snapshots(self._source.dsn).export()) as snapshot:
            return snapshot.mark.high

    def has(self, table: str, position: CdcOffset) -> bool:
        """Whether the mirror has all of *table* that committed up to *position*."""
        config = self._config()
        section = config.sink[0]
        try:
            described = {one.full_name: one for one in described_tables(config.store)}
            query, sink = config.query(section), section.open()
            delivery = QueryDelivery(config.store, config.state, query, sink, described[f"public.{table}"])
            return delivery(position, 0.0)
        except (HeadwaterError, KeyError):
            return False

    def kill_capture(self) -> None:
        for pid in self.named(CAPTURE):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def down(self) -> None:
        """Keep the capture down, until :meth:`up` was called as often."""
        with self._lock:
            self._held += 1
            if self._held == 1:
                threading.Thread(target=self._keep_down, daemon=True).start()

    def _keep_down(self) -> None:
        while self._held and self.is_running:
            self.kill_capture()
            time.sleep(0.2)

    def up(self) -> None:
        with self._lock:
            self._held -= 1

    def close(self) -> None:
        self._held = 0
        if self.is_running:
            with suppress(subprocess.TimeoutExpired):
                os.killpg(self.pid, signal.SIGINT)
                assert self._process is not None
                self._process.wait(20)
        super().close()


def _die_with_us() -> None:
    """A fuzzer that is killed leaves no pipeline behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def tables_of(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the status says of each table, by its name without the schema."""
    return {str(table["name"]).removeprefix("public."): table for sink in status["sinks"] for table in sink["tables"]}


def advised(status: dict[str, Any]) -> str | None:
    """The command that the status of a table names."""
    for text in (status.get("next_step"), status.get("stopped"), status.get("waiting")):
        if found := _COMMAND.match(str(text or "")):  # the last one: those before it only look
            return found[1].rstrip(" .")
    return None


def _has_checks() -> bool:
    return "schema_check_seconds" in SourceSection.model_fields
