"""The course of the demo: a shop with a history, a pipeline that mirrors it while it is written to, a kill, the proof.

The pipeline is what a user runs: ``headwater run pipeline.toml``, in a process of its own. Everything that the demo
tells of it, it reads from the stores and the mirror, as any process may.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.backfill.control import status
from headwater.backfill.progress import Phase, TableProgress, merged
from headwater.demo.databases import DSN_VARIABLE, Database, database_of
from headwater.demo.summary import Summary
from headwater.errors import HeadwaterError
from headwater.log_store import KvLogStoreReader, LogView
from headwater.pipeline.config import PipelineConfig, load
from headwater.pipeline.verify import Findings, Verification
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN
from headwater.spark.spark_version import check_spark
from headwater.state import Snapshot, open_reader
from headwater.system.child import Child
from headwater.system.process import descendants

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one log, to measure how long each took.

    From their commit at the source, as the log has it, to the commit of the mirror's table that brought them. Both are
    of this machine's clock.

    :ivar epochs: the epoch of each. :ivar committed_ms: when each was committed. :ivar doubled: how many it has twice.
    """

    epochs: NDArray[np.uint64]
    committed_ms: Numbers
    doubled: int

    @classmethod
    def read(cls, view: Snapshot, log: str) -> Changes:
        """All that the log still has."""
        shown = LogView.open(view, log)
        batches = list(shown.read_range(shown.bounds().gone, shown.sealed))
        if not batches:
            return cls(np.zeros(0, np.uint64), np.zeros(0), 0)
        epochs = np.concatenate([batch.column("_epoch").to_numpy() for batch in batches])
        times = np.concatenate([batch.column(COMMIT_TIMESTAMP_COLUMN).cast(pa.int64()).to_numpy() for batch in batches])
        positions = pa.chunked_array([batch.column(POSITION_COLUMN) for batch in batches])
        return cls(epochs, times / 1000, len(epochs) - len(positions.unique()))


@dataclass(frozen=True, slots=True)
class MirrorCommits:
    """The commits of one Delta table.

    :ivar epochs: of those that brought changes, in order: up to which epoch. :ivar visible_ms: when they could be seen.
    :ivar history_ms: when the last one that brought history could be seen; 0 before the first.
    """

    epochs: NDArray[np.uint64]
    visible_ms: Numbers
    history_ms: float

    @classmethod
    def read(cls, table: Path) -> MirrorCommits:
        found = list(_commits(table / "_delta_log"))
        changes = sorted((version, visible) for kind, version, visible in found if kind == "changes")
        return cls(
            np.array([version for version, _ in changes], np.uint64),
            np.array([visible for _, visible in changes], np.float64),
            max((visible for kind, _, visible in found if kind == "history"), default=0.0),
        )

    def latencies(self, changes: Changes, since_ms: float, until_ms: float) -> Numbers:
        """Of the changes that were committed in ``[since, until)`` and that the mirror has, in milliseconds."""
        wanted = (changes.committed_ms >= since_ms) & (changes.committed_ms < until_ms)
        places = np.searchsorted(self.epochs, changes.epochs[wanted])
        there = places < len(self.epochs)
        made: Numbers = self.visible_ms[places[there]] - changes.committed_ms[wanted][there]
        return made


def _commits(log: Path) -> Iterator[tuple[str, int, float]]:
    """What each commit brought: its kind, up to which epoch or plan, and when it could be seen."""
    for path in log.glob("*.json"):
        visible = path.stat().st_mtime_ns / 1e6
        for line in path.read_text().splitlines():
            told = json.loads(line).get("txn")
            if told is not None:
                yield told["appId"].rpartition("/")[2], int(told["version"]), visible


def percentile(values: Numbers, share: float) -> float:
    return round(float(np.percentile(values, share)), 1) if len(values) else 0.0


SPOIL: Final = "HEADWATER_DEMO_SPOIL"
"""An environment variable for tests of the demo: with any value, rows of the mirror are changed before the check."""

_SETTINGS: Final = """\
# What the demo runs: headwater run pipeline.toml
[pipeline]
name = "demo"
store = "store"

[source]
dsn_env = "{variable}"
tables = {tables}
heartbeat_seconds = 1.0

[[sink]]
kind = "delta"
path = "lake"
"""
_LOOK_SECONDS: Final = 0.2
_START_SECONDS: Final = 240.0
_BACKFILL_SECONDS: Final = 600.0
_DRAIN_SECONDS: Final = 180.0
_STOP_SECONDS: Final = 60.0
_INTERRUPT_SECONDS: Final = 20.0
_WRITER_SECONDS: Final = 30.0
_WRITER, _RUN = "writer", "run"


class Show(Protocol):
    """Who is told of the course of a demo."""

    def say(self, text: str) -> None:
        """Something begins or has happened."""
        ...

    def progress(self, tables: Sequence[TableProgress]) -> None:
        """How far the history is."""
        ...

    def live(self, text: str) -> None:
        """What flows just now."""
        ...

    def checked(self, sink: str, table: str, done: int, total: int) -> None:
        """How far the comparison of a table is."""
        ...


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """How much, and for how long.

    :ivar rows: of history, in all tables. :ivar seconds: of live changes after it. :ivar rate: changes a second.
    :ivar source: the kind of database: ``postgres`` or ``mariadb``.
    """

    rows: int = 1_000_000
    seconds: float = 20.0
    rate: float = 800.0
    source: str = "postgres"


@dataclass(slots=True)
class _Times:
    """Moments, in milliseconds since 1970: when the history began to be read, when it was there, when the shop rested.

    :ivar recovery: seconds from the kill to the next epoch.
    """

    reading_ms: float = 0.0
    live_ms: float = 0.0
    rest_ms: float = 0.0
    recovery: float = 0.0


def run_demo(folder: Path, options: DemoOptions, show: Show, hurry: Event | None = None) -> Summary:
    """The whole course, in *folder*; nothing is left running.

    :param hurry: when it is set, the processes are ended without waiting for them.
    :raises HeadwaterError: the pipeline ended, or did not come to its end in time; PySpark is missing or unsupported.
    """
    check_spark()
    began = time.monotonic()
    with ExitStack() as stack:
        database = database_of(options.source)
        show.say(f"starting a {database.title} …")
        dsn = stack.enter_context(database.server(folder))
        show.say(f"filling a shop with {options.rows:,} rows …")
        database.shop.create(dsn, options.rows)
        return _Course(folder, database, dsn, options, show, stack, began, hurry or Event()).run()


class _Course:
    def __init__(
        self,
        folder: Path,
        database: Database,
        dsn: str,
        options: DemoOptions,
        show: Show,
        stack: ExitStack,
        began: float,
        hurry: Event,
    ) -> None:
        self._began, self._hurry = began, hurry
        self._shop: ModuleType = database.shop
        self._folder, self._options, self._show, self._stack = folder, options, show, stack
        self._environment = _environment(folder, dsn)
        self._session = stack.enter_context(self._shop.connect(dsn))
        self._config = self._configure()
        self._times = _Times()
        self._held = 0
        self._kills = 0
        self._progress: list[TableProgress] = []
        self._kept: set[str] = set()

    def _configure(self) -> PipelineConfig:
        names = ", ".join(f'"{name}"' for name in self._shop.TABLES)
        path = self._folder / "pipeline.toml"
        path.write_text(_SETTINGS.format(variable=DSN_VARIABLE, tables=f"[{names}]"))
        os.environ[DSN_VARIABLE] = self._environment[DSN_VARIABLE]
        self._stack.callback(os.environ.pop, DSN_VARIABLE, None)
        return load(path)

    @property
    def _store(self) -> str:
        return self._config.store

    @property
    def _query(self) -> str:
        return self._config.query(self._config.sink[0])

    def run(self) -> Summary:
        self._writer = self._child(_WRITER, ["-m", self._shop.PROCESS, "1", str(self._options.rate)])
        self._pipeline = self._child(_RUN, ["-m", "headwater.cli.main", "run", "pipeline.toml"])
        self._show.say("headwater run: the history is read while the shop goes on …")
        self._until(self._is_reading, _START_SECONDS, "The pipeline did not start")
        self._times.reading_ms = time.time() * 1000
        self._until(self._is_half, _BACKFILL_SECONDS, "The history was not read")
        self._kill_capture()
        self._until(self._is_done, _BACKFILL_SECONDS, "The history was not read")
        self._live()
        transactions = self._rest()
        if SPOIL in os.environ:
            _spoil(self._folder / "lake" / self._shop.ORDERS)
        self._show.say("comparing every row of the source with the mirror …")
        found = list(Verification(self._config).run(progress=self._show.checked))
        self._show.say("stopping …")
        self._pipeline.stop_all(_STOP_SECONDS, self._hurry)
        return self._summary(found, transactions)

    def _child(self, name: str, arguments: list[str]) -> Child:
        child = Child(arguments, log=self._log(name), folder=self._folder, environment=self._environment)
        self._stack.callback(child.stop_all, _INTERRUPT_SECONDS, self._hurry)
        return child

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _tail(self, name: str, lines: int = 20) -> str:
        """The end of what a process wrote."""
        return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-lines:])

    # -- while it runs ---------------------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], seconds: float, problem: str) -> None:
        """Look at everything again and again until *done*."""
        deadline = time.monotonic() + seconds
        self._look()
        while not done():
            if not self._pipeline.is_running or not self._writer.is_running:
                name = _WRITER if self._pipeline.is_running else _RUN
                raise HeadwaterError(
                    f"A process of the demo has ended:\n{self._tail(name)}", next_step=f"See {self._log(name)}."
                )
            if time.monotonic() > deadline:
                raise HeadwaterError(
                    f"{problem} within {seconds:.0f} s:\n{self._tail(_RUN)}", next_step="Try again with --keep."
                )
            time.sleep(_LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        self._held = max(self._held, self._shop.held_bytes(self._session))
        self._keep_logs()
        told = status(self._config.state, self._query)
        if told is not None:
            self._progress = [_progress(name, value) for name, value in told.value["tables"].items()]
            self._show.progress(self._progress)

    def _keep_logs(self) -> None:
        """A consumer of each log that reads nothing: what the log has stays, for the proof."""
        for log in self._shop.TABLES:
            if log not in self._kept:
                with suppress(LookupError):
                    KvLogStoreReader.open(self._store, "demo-proof", [log]).close()
                    self._kept.add(log)

    def _is_reading(self) -> bool:
        return any(one.phase is not Phase.WAITING for one in self._progress)

    def _is_half(self) -> bool:
        now = merged("demo", self._progress)
        return now.phase in (Phase.SETTLING, Phase.DONE) or (now.fraction or 0.0) >= 0.5

    def _is_done(self) -> bool:
        return len(self._progress) == len(self._shop.TABLES) and all(one.phase is Phase.DONE for one in self._progress)

    def _kill_capture(self) -> None:
        """As ``kill -9`` does it: the supervisor of the pipeline starts it again."""
        with open_reader(self._store) as reader:
            owner = reader.owner()
        if owner is None or owner.pid not in descendants(self._pipeline.pid):
            raise HeadwaterError("The process that captures was not found.", next_step="Try again with --keep.")
        os.kill(owner.pid, signal.SIGKILL)
        killed, self._kills = time.monotonic(), 1
        with open_reader(self._store) as reader:
            before = reader.committed_epoch()
        self._show.say("[yellow]kill -9[/] of the capture, in the middle of its work")

        def is_back() -> bool:
            with open_reader(self._store) as reader:
                return reader.committed_epoch() > before

        self._until(is_back, _START_SECONDS, "The capture did not come back")
        self._times.recovery = time.monotonic() - killed
        self._show.say(f"the capture is back after {self._times.recovery:.1f} s, where it was")

    def _live(self) -> None:
        self._show.say(f"the history is there; live changes for {self._options.seconds:.0f} s …")
        self._drain()  # what the history and the kill have left behind
        self._times.live_ms = time.time() * 1000
        ends = time.monotonic() + self._options.seconds

        def is_over() -> bool:
            left = max(0.0, ends - time.monotonic())
            lag = self._lag_ms()
            shown = f"mirror {lag / 1000:.1f} s behind · " if lag is not None else ""
            self._show.live(f"live · {shown}{left:.0f} s to go")
            return left == 0

        self._until(is_over, self._options.seconds + 60, "The live changes did not end")

    def _lag_ms(self) -> float | None:
        commits = MirrorCommits.read(self._folder / "lake" / self._shop.ORDERS)
        return time.time() * 1000 - float(commits.visible_ms[-1]) if len(commits.visible_ms) else None

    def _rest(self) -> int:
        """End the shop, and wait until all of it is delivered. How many transactions it committed."""
        self._times.rest_ms = time.time() * 1000
        self._writer.stop_all(_WRITER_SECONDS, self._hurry)
        self._show.say("the shop rests; the mirror catches up …")
        self._drain()
        return int(self._tail(_WRITER, 1))

    def _drain(self) -> None:
        if not Verification(self._config).wait(_DRAIN_SECONDS):
            raise HeadwaterError(
                f"The mirror did not catch up within {_DRAIN_SECONDS:.0f} s:\n{self._tail(_RUN)}",
                next_step="Try again with --keep.",
            )

    # -- the end ---------------------------------------------------------------------------------------------------

    def _summary(self, found: Sequence[Findings], transactions: int) -> Summary:
        times = self._times
        changes, doubled, commits, history_ms = 0, 0, 0, 0.0
        live, backfill = [], []
        with open_reader(self._store) as reader, reader.snapshot() as view:
            for name in self._shop.TABLES:
                told, mirror = Changes.read(view, name), MirrorCommits.read(self._folder / "lake" / name)
                changes += len(told.epochs)
                doubled += told.doubled
                commits += len(mirror.epochs)
                history_ms = max(history_ms, mirror.history_ms)
                live.append(mirror.latencies(told, times.live_ms, times.rest_ms))
                backfill.append(mirror.latencies(told, times.reading_ms, times.live_ms))
        flowed, before = np.concatenate(live), np.concatenate(backfill)
        seconds = max((history_ms - times.reading_ms) / 1000, 1e-3)
        rows = sum(one.rows for one in self._progress)
        return Summary(
            source_rows=sum(one.source_rows for one in found),
            sink_rows=sum(one.mirror_rows for one in found),
            mismatches=sum(one.mismatches for one in found),
            lost=sum(one.missing for one in found),
            extra=sum(one.extra for one in found),
            doubled=doubled + sum(one.doubled for one in found),
            unsettled=sum(one.unsettled for one in found),
            latency_p50_ms=percentile(flowed, 50),
            latency_p99_ms=percentile(flowed, 99),
            backfill_latency_p50_ms=percentile(before, 50),
            backfill_latency_p99_ms=percentile(before, 99),
            backfill_rows=rows,
            backfill_seconds=round(seconds, 2),
            backfill_rows_per_second=round(rows / seconds),
            changes=changes,
            changes_per_second=round(len(flowed) / max((times.rest_ms - times.live_ms) / 1000, 1e-3), 1),
            transactions=transactions,
            mirror_commits=commits,
            kills=self._kills,
            recovery_seconds=round(times.recovery, 2),
            wal_held_max_bytes=self._held,
            seconds=round(time.monotonic() - self._began, 1),
        )


def _environment(folder: Path, dsn: str) -> dict[str, str]:
    scratch = folder / "scratch"
    scratch.mkdir()
    return {
        **os.environ,
        DSN_VARIABLE: dsn,
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),
    }


def _progress(name: str, value: Mapping[str, object]) -> TableProgress:
    known = {key: value[key] for key in TableProgress.__slots__ if key in value}
    return TableProgress.from_json({"table": name, **known})


def _spoil(table: Path) -> None:
    """Change a row of the mirror and remove another one."""
    from deltalake import DeltaTable

    key = "_id" if "_id" in DeltaTable(table).schema().to_arrow().names else "id"
    DeltaTable(table).update({"state": "'spoiled'"}, predicate=f"{key} = 1")
    DeltaTable(table).delete(f"{key} = 2")
