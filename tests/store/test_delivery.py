"""A whole delivery without a database, without Spark and with a clock that stands still until the test moves it: the
log of a capture and a versioned table of it on disk, planned, staged and committed by the loop of every sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from tests.here import Here
from tests.store.sinks.file_sinks import DELETE, INSERT, UPDATE, table_of
from tests.store.versioned.written import WrittenTable

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import TABLES, QueryOptions
from headwater.capture.source_state import CapturedTable, SourceRecord, SourceState, TableState
from headwater.sinks.sink import Capabilities, Committed, HistoryPart, Mode, Staged, Token
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.table import SourceTable
from headwater.stream import Op
from headwater.system.clock import Clock

pytestmark = pytest.mark.store

NUMBERS = table_of({"id": pa.int64(), "v": pa.int64()}, key=("id",))
NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"
Rows = dict[int, int]


class CapturedNumbers(WrittenTable):
    """The table, its log as a capture of Postgres leaves it, and a versioned table of it."""

    def write(self, *changes: tuple[Any, ...] | str) -> int:
        batch = self._factory.sealer.batch
        with self.store.snapshot() as view:
            state = SourceState(self._factory.catalog, view, batch)
        if NUMBERS.full_name not in state.tables:
            since = PostgresOffset.at(1)
            state.put_table(
                batch, CapturedTable(NUMBERS.full_name, "public", NUMBERS.name, None, TableState.ACTIVE, since, "")
            )
        epoch = self._writer.epoch
        state.put(batch, SourceRecord({}, PostgresOffset.at(epoch >> 16), epoch.unix_ms * 1000))
        return super().write(*changes)


@dataclass
class Mirror:
    """What a memory sink has."""

    rows: Rows = field(default_factory=dict)
    token: Committed = field(default_factory=Committed)
    batches: int = 0


MIRRORS: dict[str, Mirror] = {}


@dataclass(frozen=True)
class MemorySink:
    """A mirror in this process, found by *key*: the sink itself is pickled, as on its way to tasks."""

    capabilities: ClassVar = Capabilities((Mode.MIRROR,))
    key: str
    mode: Mode = Mode.MIRROR

    @property
    def name(self) -> str:
        return f"memory:{self.key}"

    @property
    def mirror(self) -> Mirror:
        return MIRRORS.setdefault(self.key, Mirror())

    def check(self) -> None:
        pass

    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        return self.mirror.token

    def stage_changes(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], truncated: tuple[int, int] | None
    ) -> Staged:
        rows = [(row["_op"], row["id"], row["v"]) for batch in batches for row in batch.to_pylist()]
        return Staged(table, token, False, len(rows), detail=rows)

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        rows = [(int(Op.INSERT), row["id"], row["v"]) for batch in batches for row in batch.to_pylist()]
        return Staged(table, token, True, len(rows), detail=rows)

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        mirror = self.mirror
        if mirror.token.epoch >= token.epoch and mirror.token.plan >= token.plan:
            return False
        for part in sorted(staged, key=lambda part: part.is_snapshot):
            for op, key, value in part.detail:
                if op in (Op.DELETE, Op.UPDATE_DELETE):
                    del mirror.rows[key]
                    continue
                assert not part.is_snapshot or key not in mirror.rows, "a row of the backfill is delivered once"
                mirror.rows[key] = value
        mirror.token, mirror.batches = Committed(token.epoch, token.plan), mirror.batches + 1
        return True

    def fence(self, table: SourceTable, query: str, generation: int) -> None:
        pass

    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        pass

    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([{"id": key, "v": value} for key, value in self.mirror.rows.items()])


@dataclass
class HandClock:
    """Time that passes when the test says so; nobody may sleep."""

    now: float = 1_000.0
    ids: int = 0

    def new_id(self) -> str:
        self.ids += 1
        return f"{self.ids:032x}"

    def never(self, seconds: float) -> None:
        raise AssertionError(f"somebody sleeps for {seconds} s")

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: int(self.now * 1000), self.never, self.new_id)


@pytest.fixture
def numbers(tmp_path: Path) -> Iterator[CapturedNumbers]:
    table = CapturedNumbers(tmp_path, NUMBERS)
    yield table
    table.close()


@pytest.fixture
def opened(numbers: CapturedNumbers, tmp_path: Path) -> Iterator[Callable[..., DeliveryLoop[QueryPlanner]]]:
    """A loop over the table into a memory sink; each call fences the one before."""
    loops: list[DeliveryLoop[QueryPlanner]] = []

    def open_loop(time: HandClock, **options: Any) -> DeliveryLoop[QueryPlanner]:
        versioned: dict[str, Any] = {"keyed": True, "kept": str(numbers.root), "origin": TABLES}
        query = QueryOptions(numbers.location, NOWHERE, "mirror", (NUMBERS.full_name,), **versioned | options)
        loops.append(DeliveryLoop(Delivery(query, MemorySink(str(tmp_path))), Here(), clock=time.clock))
        return loops[-1]

    yield open_loop
    for loop in loops:
        loop.close()
    del MIRRORS[str(tmp_path)]


def step(loop: DeliveryLoop[QueryPlanner]) -> bool:
    """One batch, if there is one now."""
    if not loop.plan(0.0):
        return False
    loop.deliver()
    return True


def test_changes_are_planned_staged_and_committed_epoch_by_epoch(
    numbers: CapturedNumbers, opened: Callable[..., DeliveryLoop[QueryPlanner]], tmp_path: Path
) -> None:
    for number in range(3):
        numbers.write((INSERT, {"id": number, "v": 0}), (INSERT, {"id": number + 10, "v": 0}))
    numbers.write((DELETE, {"id": 1, "v": 0}), (UPDATE, {"id": 2, "v": 5}))
    loop = opened(HandClock(), history=False, max_epochs=1)
    while step(loop):
        pass
    mirror = MIRRORS[str(tmp_path)]
    assert mirror.rows == {0: 0, 2: 5, 10: 0, 11: 0, 12: 0}
    assert (mirror.batches, mirror.token.epoch) == (4, numbers.newest)
    assert loop.planner.status()["updated_ms"] == 1_000_000


def test_a_backfill_goes_as_fast_as_its_rate_allows_and_changes_flow_beside_it(
    numbers: CapturedNumbers, opened: Callable[..., DeliveryLoop[QueryPlanner]], tmp_path: Path
) -> None:
    truth: Rows = dict.fromkeys(range(2_000), 0)
    numbers.history([{"id": key, "v": value} for key, value in truth.items()])
    time = HandClock()

    def open_again() -> DeliveryLoop[QueryPlanner]:
        return opened(time, split_rows=100, interval_seconds=1.0, rows_per_second=100)

    loop, seconds = open_again(), 0
    mirror = MIRRORS.setdefault(str(tmp_path), Mirror())
    while not loop.planner.is_history_done():
        rows = loop.planner.status()["tables"][NUMBERS.full_name]["rows"]
        assert rows <= 100 * (seconds + 2) + 50, "no faster than the rate, but for a burst and a vnode"
        key = seconds * 7 % 2_000
        truth[key] = seconds
        numbers.write((UPDATE, {"id": key, "v": seconds}))
        while step(loop):
            pass
        if seconds == 5:  # as a restart: it goes on where it was
            loop.close()
            loop = open_again()
        seconds, time.now = seconds + 1, time.now + 1.0
        assert seconds < 60
    while step(loop):
        pass
    assert mirror.rows == truth
    assert 15 <= seconds <= 30
