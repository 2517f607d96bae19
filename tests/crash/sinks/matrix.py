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
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.crash.sinks.coordinated import QUERY, Delivery, State, deliver, found, make_log
from tests.db.sinks.cases import ON_FAMILIES, PLACES, Case, Servers

from headwater.sinks.delivery_record import DELIVERIES, FOLDER
from headwater.sinks.sink import Staged
from headwater.sinks.staged_codec import decode
from headwater.state import Catalog
from headwater.state.beside import open_beside_reader

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["deltalake.exceptions", "pyarrow.parquet", "pyarrow.dataset", "tests.crash.sinks.coordinated"]
)

AT_LEAST_ONCE: Final = frozenset({"console", "webhook"})
"""Kinds that promise less: a batch that was sent right before a crash is sent again."""
STAGED_IN_FILES: Final = frozenset({"delta", "iceberg", "kafka", "parquet", "table"})
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


@dataclass(frozen=True)
class Cell:
    """A process of *case* is killed when it passes *step* for the *at*-th time; in a recovery if *again*.

    :ivar damaged: then every file that it had staged is cut to half its size.
    """

    case: Case
    step: str
    at: int
    again: bool = False
    damaged: bool = False

    def __str__(self) -> str:
        how = ", in a recovery" if self.again else ", staged files damaged" if self.damaged else ""
        return f"{self.case} {self.step}@{self.at}{how}"


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
            *(Cell(case, step, 1, again=True) for step in sorted(hits) if _is_ours(step)),
            *([damaged_cell(case)] if case.kind in STAGED_IN_FILES else []),
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
        with self.place(cell.case) as delivery:
            if cell.again:
                run(deliver, replace(delivery, armed=self.FIRST))
                delivery = replace(delivery, generation=2)
            ended = run(deliver, replace(delivery, armed=f"{cell.step}=kill@{cell.at}"))
            if ended != -signal.SIGKILL:
                return f"it was not killed but ended with {ended}"
            if cell.damaged and not damage_staged(delivery):
                return "no file was staged"
            last = replace(delivery, generation=delivery.generation + 1)
            try:
                _, state = found_by(last)
            except ChildProcessError as error:
                return str(error)
            return state.problem(cell.case.mode, self._clean[cell.case])

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
    return Cell(case, "delivery.after_pending", 3, damaged=True)


def damage_staged(delivery: Delivery) -> int:
    """Cut the files of the batch that is pending to half their size; how many they are."""
    with open_beside_reader(delivery.store, FOLDER, QUERY) as reader, reader.snapshot() as view:
        rows = [values for _, values in Catalog.load(view).open(DELIVERIES).scan(view, 0)]
    names = {name for values in rows if values[1] for name in _staged_names(decode(values[1]) or [])}
    paths = [path for path in Path(delivery.store).parent.rglob("*") if path.name in names]
    for path in paths:
        os.truncate(path, path.stat().st_size // 2)
    return len(paths)


def _staged_names(staged: Sequence[Staged]) -> Iterator[str]:
    for one in staged:
        yield from (Path(file.path).name for file in one.detail.get("files", ()))
        yield from (part.path for part in one.detail.get("parts", ()) if part.path is not None)
        yield from (run.name for run in one.detail.get("runs", ()))


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
