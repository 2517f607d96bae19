"""Rounds: scripts run side by side, each on a table of one pipeline that lives on; then every table is compared."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.fuzz.mirrors import DeltaMirror, IcebergMirror, Mirror, PostgresMirror
from tests.fuzz.pipeline import FuzzPipeline, advised, tables_of
from tests.fuzz.script import BEGIN, CHECK, COMMIT, DOWN, HARNESS, KILL, ROLLBACK, SESSIONS, UP, Script, Step
from tests.fuzz.sources import FuzzSource, PostgresFuzz
from tests.fuzz.values import difference

SETTLE_SECONDS: Final = 60.0
LIVE_SECONDS: Final = 3.0
"""A live table that has every change may differ for this long: its status and its rows are read one after the other."""
START_SECONDS: Final = 180.0
LOOK_SECONDS: Final = 0.3
REPAIRS: Final = 3
COMMANDS: Final = 4
"""So many are run side by side."""
VERDICTS: Final = ("", "followed", "read again", "stopped, repaired", "FAILED")
Say = Callable[[str], None]


@dataclass
class Outcome:
    """What came of one round.

    :ivar wrong: how it failed; ``None``: the mirror was equal at each comparison. :ivar of_run: the run ended with it.
    :ivar cut_off: the run ended and did not say by which table. :ivar repairs: the advised commands that were run.
    :ivar late: seconds for which the table was live, had the position, and was not equal. :ivar reread: rows that were
        read again, in readings of *rows* each.
    :ivar done: statements that the database took. :ivar refused: those that it refused.
    """

    script: Script
    table: str
    wrong: str | None = None
    of_run: bool = False
    cut_off: bool = False
    repairs: list[str] = field(default_factory=list)
    late: float = 0.0
    reread: int = 0
    rows: int = 0
    is_reading: bool = True
    done: int = 0
    refused: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One of :data:`VERDICTS`."""
        if self.wrong is not None:
            return "FAILED"
        return "stopped, repaired" if self.repairs else "read again" if self.reread else "followed"


class Fuzzer:
    """A database, a mirror, and a pipeline between them with *width* tables.

    :param say: takes lines for a person.
    """

    def __init__(self, source: FuzzSource, mirror: str, width: int, say: Say, shared: ExitStack) -> None:
        self._source, self._kind, self._say, self._shared = source, mirror, say, shared
        self.tables = [f"t{number}" for number in range(width)]
        self._resets = 0
        self._mirror: Mirror | None = None
        self._pipeline: FuzzPipeline | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pipeline(self) -> FuzzPipeline:
        assert self._pipeline is not None
        return self._pipeline

    @property
    def mirror(self) -> Mirror:
        assert self._mirror is not None
        return self._mirror

    def close(self) -> None:
        """End the pipeline and remove its files."""
        if self._pipeline is not None:
            self._pipeline.close()
        if self._mirror is not None:
            self._mirror.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._pipeline = self._mirror = self._folder = None

    def run(self, scripts: Sequence[Script]) -> list[Outcome]:
        """Run up to as many scripts as there are tables; what came of each."""
        outcomes = self._run(scripts)
        cut_off = [one for one in outcomes if one.cut_off]
        if not cut_off or len(outcomes) == 1:
            return outcomes
        left = [one.script for one in cut_off]
        half = len(left) if len(left) < len(outcomes) else len(left) // 2  # nobody was named: find who it was
        again = [*self.run(left[:half]), *(self.run(left[half:]) if left[half:] else [])]
        if len(left) == len(outcomes) and all(one.wrong is None for one in again):
            again[0].wrong = f"with {len(left)} scripts side by side, and not again, {cut_off[0].wrong}"
        return [*(one for one in outcomes if not one.cut_off), *again]

    def _run(self, scripts: Sequence[Script]) -> list[Outcome]:
        outcomes = [Outcome(script, table) for script, table in zip(scripts, self.tables, strict=False)]
        prefix = self._prepare(outcomes)
        with ExitStack() as stack:
            writers = [_Writer(self, one, prefix, stack) for one in outcomes if one.wrong is None]
            while any(writer.left for writer in writers):
                self._say(f"{len(writers)} scripts on {self._source.kind}, to be compared in {self._kind}")
                threads = [threading.Thread(target=writer.until_check) for writer in writers]
                for thread in threads:
                    thread.start()
                while any(thread.is_alive() for thread in threads):
                    self._count(outcomes, self.pipeline.tables())
                    time.sleep(LOOK_SECONDS)
                self._settle([writer.outcome for writer in writers], SETTLE_SECONDS)
                writers = [writer for writer in writers if writer.outcome.wrong is None]
        return outcomes

    def _count(self, outcomes: Sequence[Outcome], found: dict[str, dict[str, Any]]) -> None:
        """Count the rows of each reading that has ended, or that was too short to be seen."""
        for one in outcomes:
            told = found.get(one.table, {})
            rows, is_live = int(told.get("rows") or 0), told.get("phase") == "live"
            if is_live and (one.is_reading or rows != one.rows):
                one.reread += rows
                one.rows = rows
            one.is_reading = not is_live

    def _prepare(self, outcomes: list[Outcome]) -> str:
        """Give each script a fresh table in the pipeline, with its first rows in the mirror; the prefix of columns."""
        self._resets += 1
        prefix = f"c{self._resets}_"
        if self._pipeline is not None and not self._pipeline.is_running:
            self.close()
        if self._pipeline is None:
            self._source.renew()
            for table in self.tables[len(outcomes) :]:
                self._create(table, ("CREATE TABLE {t} (id bigint PRIMARY KEY)",), "")
        for one in outcomes:
            self._source.remove(one.table)
            self._create(one.table, one.script.create, prefix)
        if self._pipeline is None:
            self._start()
        self._settle(outcomes, START_SECONDS)
        broken = [one for one in outcomes if one.wrong is not None]
        for one in broken:
            one.wrong = f"before the script, after DROP and CREATE: {one.wrong}"
        for one in outcomes:
            one.repairs.clear()
            one.late, one.reread = 0.0, 0
        return prefix

    def _create(self, table: str, texts: Sequence[str], prefix: str) -> None:
        writer = self._source.writer()
        try:
            for text in texts:
                if error := writer.execute(_filled(text, table, prefix)):
                    raise AssertionError(f"The first statements must work: {error}: {text}")
        finally:
            writer.close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headwater-fuzz-")
        folder = Path(self._folder.name)
        if self._kind == "postgres":
            if not isinstance(server := self._source, PostgresFuzz):
                server = self._shared_postgres()
            self._mirror = PostgresMirror(server)
        else:
            self._mirror = DeltaMirror(folder) if self._kind == "delta" else IcebergMirror(folder)
        self._pipeline = FuzzPipeline(folder, self._source, self.tables, self.mirror.toml)
        self._say(f"{self._source.kind} to {self._kind}: a pipeline of {len(self.tables)} tables in {folder}")
        self._pipeline.start()

    def _shared_postgres(self) -> PostgresFuzz:
        server = PostgresFuzz()
        self._shared.callback(server.close)
        return server

    def _settle(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """With the writers held: each table is equal, or stops and is repaired, or its round has failed."""
        began, began_time = time.monotonic(), time.time()
        position = self.pipeline.position()
        ends = {one.table: began + seconds for one in outcomes}
        live_since: dict[str, float] = {}
        waiting = {one.table: one for one in outcomes if one.wrong is None}
        while waiting:
            if not self.pipeline.is_running:
                self._ended(list(waiting.values()))
                return
            status = self.pipeline.status()
            found = tables_of(status)
            self._count(outcomes, found)
            if float(status["capture"].get("checked_time") or began_time) < began_time:
                live_since.clear()  # the catalog was not looked at since: only then must live tables be equal
            due: list[tuple[Outcome, str]] = []
            for name, one in list(waiting.items()):
                told = found.get(name, {})
                state = self._look(one, told, position, live_since)
                if state is None:
                    del waiting[name]
                elif time.monotonic() > min(ends[name], live_since.get(name, ends[name]) + LIVE_SECONDS):
                    one.wrong = f"after {time.monotonic() - began:.0f} s {state}"
                    del waiting[name]
                elif (command := self._due_repair(one, told)) is not None:
                    due.append((one, command))
            with ThreadPoolExecutor(COMMANDS) as pool:
                complaints = list(pool.map(self.pipeline.command, [command for _, command in due]))
            for (one, command), complaint in zip(due, complaints, strict=True):
                self._say(f"{one.table}: {_reason(found[one.table])} Ran: headwater {command}")
                one.repairs.append(command)
                ends[one.table] = time.monotonic() + seconds
                if complaint and self.pipeline.is_running:
                    one.wrong = f"it stopped ({_reason(found[one.table])}) and its advised command failed: {complaint}"
                    del waiting[one.table]
            time.sleep(LOOK_SECONDS)

    def _look(self, one: Outcome, told: dict[str, Any], position: Any, live_since: dict[str, float]) -> str | None:
        """``None``: the mirror is equal; else how the table is."""
        if told.get("stopped"):
            live_since.pop(one.table, None)
            return f"it is stopped: {_reason(told)}"
        if told.get("phase") != "live":
            live_since.pop(one.table, None)
            return f"it is {told.get('phase') or 'not there'}: {_reason(told)}"
        if told.get("lag_rows") or not self.pipeline.has(one.table, position):
            live_since.pop(one.table, None)
            return "it is live and the mirror does not have the position of the source"
        differs = difference(self._source.rows(one.table), self.mirror.rows(one.table))
        since = live_since.setdefault(one.table, time.monotonic())
        if differs is None:
            one.late = max(one.late, time.monotonic() - since)
            return None
        return f"it is live and differs: {differs}"

    def _due_repair(self, one: Outcome, told: dict[str, Any]) -> str | None:
        is_stopped = told.get("stopped") or told.get("phase") in ("stopped", "parked", "incomplete")
        return advised(told) if is_stopped and len(one.repairs) < REPAIRS else None

    def _ended(self, outcomes: list[Outcome]) -> None:
        status = self.pipeline.status()
        said = [status.get("error"), status.get("next_step"), *(sink.get("error") for sink in status["sinks"])]
        text = " ".join(str(one) for one in said if one) or self.pipeline.complaints()[-500:]
        named = [one for one in outcomes if re.search(rf"\bpublic\.{one.table}\b", text)]
        for one in outcomes:
            one.wrong, one.of_run, one.cut_off = f"the run ended: {text}", True, one not in named
        self._say(f"the run ended: {text}")


class _Writer:
    """The sessions of one script."""

    def __init__(self, fuzzer: Fuzzer, outcome: Outcome, prefix: str, stack: ExitStack) -> None:
        self._fuzzer, self.outcome, self._prefix = fuzzer, outcome, prefix
        self.left: list[Step] = list(outcome.script.steps)
        if not self.left or self.left[-1].text != CHECK:
            self.left.append(Step(HARNESS, CHECK, CHECK))
        self._rng = Random(outcome.script.number)
        self._sessions = [fuzzer._source.writer() for _ in range(SESSIONS)]
        for session in self._sessions:
            stack.callback(session.close)

    def until_check(self) -> None:
        """Run the steps up to the next comparison."""
        pipeline = self._fuzzer.pipeline
        held = 0
        broken: set[int] = set()  # sessions in a transaction that ended with an error
        inside: set[int] = set()
        while self.left:
            step = self.left.pop(0)
            if step.text == CHECK and step.session == HARNESS:
                break
            if step.session == HARNESS:
                if step.text == UP and not held:
                    continue
                held += {DOWN: 1, UP: -1}.get(step.text, 0)
                {KILL: pipeline.kill_capture, DOWN: pipeline.down, UP: pipeline.up}[step.text]()
                time.sleep(self._rng.uniform(0.2, 1.0))
                continue
            if step.text in (BEGIN, COMMIT, ROLLBACK):
                broken.discard(step.session)
                (inside.add if step.text == BEGIN else inside.discard)(step.session)
            elif step.session in broken:
                continue
            error = self._sessions[step.session].execute(_filled(step.text, self.outcome.table, self._prefix))
            if error:
                self.outcome.refused.append(f"{step.name}: {error}")
                broken |= inside & {step.session}
            else:
                self.outcome.done += 1
            time.sleep(self._rng.uniform(0, 0.15))
        for session in self._sessions:
            session.execute("COMMIT")
        for _ in range(held):
            pipeline.up()


def _filled(text: str, table: str, prefix: str) -> str:
    return text.replace("{t}", table).replace("{c}", prefix)


def _reason(told: dict[str, Any]) -> str:
    said = (told.get(name) for name in ("stopped", "reason", "waiting", "next_step"))
    return next((str(text) for text in said if text), "")
