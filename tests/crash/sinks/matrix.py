"""The crash matrix: every sink in every mode, killed at every durable step of a delivery, and started again.

A process that delivers (:mod:`tests.crash.sinks.coordinated`) is killed with ``kill -9`` at a failpoint; another one
finishes. After that the sink has what it has without a kill, each change once, nothing is left in staging, and the log
waits for nobody. ``make crash-matrix`` tries all of it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from tests.crash.sinks.coordinated import (
    QUERY,
    Delivery,
    State,
    begin_again,
    deliver,
    found,
    look,
    make_log,
    stop_and_go_on,
)
from tests.db.sinks.cases import ON_FAMILIES, PLACES, Case, Servers

from headwater.sinks.delivery import DELIVERIES
from headwater.sinks.sink import Staged
from headwater.sinks.staged_codec import decode
from headwater.state import Catalog
from headwater.state.query_store import QueryReader, own_state
from headwater.system.process import status_fields

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["deltalake.exceptions", "pyarrow.parquet", "pyarrow.dataset", "tests.crash.sinks.coordinated"]
)

AT_LEAST_ONCE: Final = frozenset({"console", "webhook"})
"""Kinds that promise less: a batch that was sent right before a crash is sent again."""
STAGED_IN_FILES: Final = frozenset({"delta", "iceberg", "kafka", "parquet", "table"})
INSIDE: Final = {
    "delta": "sink.delta.before_commit",
    "iceberg": "sink.iceberg.before_commit",
    "kafka": "sink.kafka.before_commit",
    "mysql": "sink.sql.before_commit",
    "parquet": "sink.parquet.before_manifest",
    "postgres": "sink.sql.before_commit",
    "table": "versioned.before_manifest",
}
"""Where the commit at the sink is under way."""
LAST_STEP: Final = "delivery.after_committed"
SMALL, LARGE, WIDENED, READ_AGAIN, TRUNCATED = 2, 3, 6, 7, 8
"""Batches by their numbers; what ``READ_AGAIN`` replaces only its source can tell: a recovery gives it up."""
EXACT: Final = [case for case in ON_FAMILIES if case.kind not in AT_LEAST_ONCE]
GROUPS: Final = (
    (
        "stage",
        (
            "sink.files.",
            "sink.staging.",
            "sink.sql.before_stage",
            "sink.sql.after_stage",
            "versioned.before_run",
            "versioned.after_run",
        ),
    ),
    ("PENDING", ("delivery.before_pending", "delivery.after_pending")),
    ("commit at the sink", ("sink.", "versioned.")),
    ("fence", ("delivery.before_fences", "delivery.after_fences")),
    ("COMMITTED", ("delivery.",)),
    ("truncate the log", ("log_store.",)),
)


def run(target: Any, delivery: Delivery) -> int:
    process = PROCESSES.Process(target=target, args=(delivery,))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
        return -1000
    return process.exitcode


class How(Enum):
    """What becomes of the process that delivers."""

    KILLED = ""
    AGAIN = "in a recovery"
    DAMAGED = "staged files damaged"
    FROZEN = "frozen"
    FORGOTTEN = "frozen, everything forgotten"


@dataclass(frozen=True)
class Cell:
    """A process of *case* is killed when it passes *step* for the *at*-th time.

    :ivar how: ``AGAIN``: the killed process is one that recovers. ``DAMAGED``: then every file that it had staged is
        cut to half its size. ``FROZEN``: it is stopped in the batch *at*, and goes on when the next process is done.
        ``FORGOTTEN``: the next process forgets everything before it begins.
    """

    case: Case
    step: str
    at: int
    how: How = How.KILLED

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"{self.case} {self.step}@{self.at}", self.how.value)))


class Matrix:
    """The crash matrix over *servers*; places are made in *folder*."""

    FIRST: Final = "delivery.after_pending=kill@3"
    """Before a recovery that is killed: the batch that is pending is a large one."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self._servers, self._folder = servers, folder
        self._log = make_log(folder)
        self._clean: dict[Case, State] = {}

    def cells(self, case: Case) -> list[Cell]:
        """All cells of a case, found by running it without a kill."""
        hits = self.clean(case)
        made = [Cell(case, step, at) for step, count in sorted(hits.items()) for at in sorted({1, count})]
        with self.place(case) as delivery:
            assert run(deliver, replace(delivery, armed=self.FIRST)) == -signal.SIGKILL
            hits, _ = found_by(replace(delivery, generation=2, upto=3))
        return [
            *(cell for cell in made if _is_ours(cell.step)),
            *(Cell(case, step, 1, How.AGAIN) for step in sorted(hits) if _is_ours(step)),
            *([damaged_cell(case)] if case.kind in STAGED_IN_FILES else []),
            *frozen_cells(case),
        ]

    def clean(self, case: Case) -> dict[str, int]:
        """Run *case* without a kill; how often each failpoint was passed."""
        with self.place(case) as delivery:
            hits, self._clean[case] = found_by(delivery)
            wrong = self._clean[case].problem(case.mode, self._clean[case])
            if wrong is not None:
                raise AssertionError(f"{case} without a kill: {wrong}")
        return hits

    def try_cell(self, cell: Cell) -> str | None:
        """Kill and start again; what is wrong then."""
        if cell.how in (How.FROZEN, How.FORGOTTEN):
            return self._try_frozen(cell)
        with self.place(cell.case) as delivery:
            if cell.how is How.AGAIN:
                run(deliver, replace(delivery, armed=self.FIRST))
                delivery = replace(delivery, generation=2)
            ended = run(deliver, replace(delivery, armed=f"{cell.step}=kill@{cell.at}"))
            if ended != -signal.SIGKILL:
                return f"it was not killed but ended with {ended}"
            if cell.how is How.DAMAGED and not damage_staged(delivery):
                return "no file was staged"
            last = replace(delivery, generation=delivery.generation + 1)
            try:
                _, state = found_by(last)
            except ChildProcessError as error:
                return str(error)
            return state.problem(cell.case.mode, self._clean[cell.case])

    def _try_frozen(self, cell: Cell) -> str | None:
        with self.place(cell.case) as delivery:
            stale = replace(delivery, armed=f"{cell.step}@{cell.at}", output=f"{delivery.output}-stale")
            later = replace(delivery, generation=2)
            process = PROCESSES.Process(target=stop_and_go_on, args=(stale,))
            process.start()
            try:
                wait_until_stopped(process.pid or 0)
                _, taken_over = found_by(later, begin_again if cell.how is How.FORGOTTEN else found)
                os.kill(process.pid or 0, signal.SIGCONT)
                process.join(60)
            except ChildProcessError as error:
                return str(error)
            finally:
                process.kill()
                process.join()
            if process.exitcode != 0:
                return f"the frozen process ended with {process.exitcode}"
            if not Path(stale.output).read_text():
                return "the frozen process was not refused"
            _, after = found_by(later, look)
            if after != taken_over:
                return "the frozen process committed something"
            return None if cell.how is How.FORGOTTEN else after.problem(cell.case.mode, self._clean[cell.case])

    def place(self, case: Case) -> _Opened:
        """A fresh place with a log."""
        return _Opened(case, self._servers, self._folder, self._log)


def found_by(delivery: Delivery, target: Any = found) -> tuple[dict[str, int], State]:
    """What a process found; by itself it delivers before. :raises ChildProcessError: it failed."""
    ended = run(target, delivery)
    if ended:
        raise ChildProcessError(f"the process that goes on ended with {ended}")
    hits, state = pickle.loads(Path(delivery.output).read_bytes())
    return hits, state


class _Opened:
    """A fresh place with a log, for one cell."""

    def __init__(self, case: Case, servers: Servers, folder: Path, log: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._place = PLACES[case.kind](case, self._folder, servers)
        shutil.copytree(log, self._folder / "store")

    def __enter__(self) -> Delivery:
        return Delivery(self._place.__enter__(), str(self._folder / "store"), 1, output=str(self._folder / "found"))

    def __exit__(self, *error: Any) -> None:
        self._place.__exit__(*error)
        shutil.rmtree(self._folder)


def damaged_cell(case: Case) -> Cell:
    """Killed with a large batch PENDING, whose staged files are damaged before the next process commits it."""
    return Cell(case, "delivery.after_pending", LARGE, How.DAMAGED)


def frozen_cells(case: Case) -> list[Cell]:
    """Frozen at each step of a batch, and what a recovery cannot settle: what it gives up, and what it never knew."""
    inside = INSIDE[case.kind]
    steps = ("delivery.before_pending", "delivery.after_pending", inside, "delivery.before_committed", LAST_STEP)
    return [
        *(Cell(case, step, LARGE, How.FROZEN) for step in steps),
        *(Cell(case, inside, at, How.FROZEN) for at in (READ_AGAIN, TRUNCATED)),
        *([Cell(case, "sink.mysql.before_shape", WIDENED, How.FROZEN)] if case.kind == "mysql" else []),
        *(Cell(case, inside, at, How.FORGOTTEN) for at in (1, SMALL, LARGE)),
        *(Cell(case, "delivery.after_pending", at, How.FORGOTTEN) for at in (1, SMALL)),
    ]


def wait_until_stopped(pid: int) -> None:
    """:raises ChildProcessError: it ends instead."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        fields = status_fields(pid)
        if fields[:1] == ["T"]:
            return
        if fields[:1] in ([], ["Z"]):
            break
        time.sleep(0.01)
    raise ChildProcessError("the process did not stop at the step")


def damage_staged(delivery: Delivery) -> int:
    """Cut the files of the batch that is pending to half their size; how many they are."""
    with QueryReader(own_state(delivery.store, QUERY), QUERY) as reader, reader.snapshot() as view:
        rows = [values for _, values in Catalog.load(view).open(DELIVERIES).scan(view, 0)]
    names = {name for values in rows if values[1] for name in _staged_names(decode(values[1]) or [])}
    paths = [path for path in Path(delivery.store).parent.rglob("*") if path.name in names]
    for path in paths:
        os.truncate(path, path.stat().st_size // 2)
    return len(paths)


def _staged_names(staged: Sequence[Staged]) -> Iterator[str]:
    for one in staged:
        yield from (Path(file.path).name for file in getattr(one.detail, "files", ()))
        yield from (part.path for part in getattr(one.detail, "parts", ()) if part.path is not None)
        yield from (run.name for run in getattr(one.detail, "runs", ()))


def _is_ours(step: str) -> bool:
    return step.startswith(("sink.", "versioned.", "delivery.", "log_store.consumer_"))


def group_of(step: str) -> str:
    """Of the protocol: which of its steps *step* belongs to."""
    return next(name for name, starts in GROUPS if step.startswith(starts))


def sampled(cells: Sequence[Cell], count: int, seed: int) -> list[Cell]:
    """Some of *cells*, of each step of the protocol in turn."""
    chance = random.Random(seed)
    mixed = chance.sample(list(cells), len(cells))
    taken: Counter[str] = Counter()
    numbered = []
    for cell in mixed:
        taken[group_of(cell.step)] += 1
        numbered.append((taken[group_of(cell.step)], chance.random(), cell))
    return [cell for _, _, cell in sorted(numbered, key=lambda one: one[:2])[:count]]


def tried(matrix: Matrix, cells: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, str | None]]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(cells, pool.map(matrix.try_cell, cells), strict=True)
