"""Both ends of a claim-check query, driven as Spark drives them, without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from headwater.backfill.offset import QueryOffset
from headwater.backfill.query import QueryOptions
from headwater.backfill.units import LogUnit, SplitUnit, Unit
from headwater.errors import ConflictError
from headwater.sinks.sink import Capabilities, Committed, HistoryPart, Mode, Staged, Token
from headwater.sources.errors import SnapshotExpired
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceColumn, SourceTable
from headwater.spark import claim_check
from headwater.spark.claim_check import Claim, ClaimDelivery, ClaimReader, ClaimSource, ClaimWriter
from headwater.spark.failure import Failure, Remedy, ToldError

OPTIONS = QueryOptions(store="/nowhere", source="postgresql://secret", query="q", tables=("public.a", "public.b"))
BATCH = pa.RecordBatch.from_pydict({"id": [1, 2]})


def table(name: str) -> SourceTable:
    return SourceTable("public", name, (SourceColumn("id", pa.int64(), "bigint", 1),), ("id",), 1)


def log_unit(name: str) -> LogUnit:
    return LogUnit(table(name), 1 << 16, 2 << 16, 0, 256, 3)


def split_unit(name: str, attempt: int = 0) -> SplitUnit:
    return SplitUnit(
        table(name), SplitKind.KEY, (KeyRange(),), "snapshot", 3, attempt, 2 << 16, b"\0" * 16, 5, 2, replaces=False
    )


@dataclass
class KeptSink:
    """Remembers what it was asked."""

    capabilities: ClassVar = Capabilities((Mode.MIRROR,))

    commits: list[tuple[str, Token, int]] = field(default_factory=list)
    broken: bool = False
    name: str = "kept"
    mode: Mode = Mode.MIRROR

    def check(self) -> None: ...

    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        return Committed()

    def stage_changes(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], truncated: Any
    ) -> Staged:
        return Staged(table, token, False, sum(batch.num_rows for batch in batches))

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        return Staged(table, token, True, sum(batch.num_rows for batch in batches))

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        if self.broken and table.name == "a":
            raise ConflictError("Somebody else wrote.", next_step="Look.")
        self.commits.append((table.full_name, token, sum(one.rows for one in staged)))
        return True

    def abort(self, table: SourceTable, query: str, generation: int) -> None: ...

    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return iter(())


class Planner:
    """Gives the units that it was given."""

    backfill_id = "b"
    generation = 1

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self.advanced = 0

    def initial(self) -> QueryOffset:
        return QueryOffset(1 << 16, 2)

    def advance(self, start: QueryOffset, *, timeout: float) -> QueryOffset:
        self.advanced += 1
        return QueryOffset(2 << 16, 3)

    def units(self, start: QueryOffset, end: QueryOffset) -> list[Unit]:
        return self._units

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_check, "read_changes", lambda *_: iter([BATCH]))
    monkeypatch.setattr(claim_check, "read_history", lambda *_: iter([BATCH, BATCH]))


@pytest.fixture
def sink() -> KeptSink:
    return KeptSink()


@pytest.fixture
def delivery(sink: KeptSink, tmp_path: Path) -> ClaimDelivery:
    return ClaimDelivery(replace(OPTIONS, store=str(tmp_path / "store")), sink, str(tmp_path / "stop"))


def reader_of(delivery: ClaimDelivery, units: list[Unit]) -> tuple[ClaimReader, Planner]:
    made, planner = ClaimReader(delivery), Planner(units)
    made._opened = planner  # type: ignore[assignment]
    return made, planner


def delivered(delivery: ClaimDelivery, units: list[Unit]) -> None:
    """One batch, as Spark does it."""
    reader, _ = reader_of(delivery, units)
    start = reader.initialOffset()
    end = reader.latestOffset(start, None)  # type: ignore[arg-type]
    parts = reader.partitions(start, end)
    elsewhere = pickle.loads(pickle.dumps(reader))
    messages = [ClaimWriter(delivery).write(elsewhere.read(part)) for part in parts]
    writer = ClaimWriter(delivery)
    writer.commit(list(pickle.loads(pickle.dumps(messages))), 0)


def test_each_table_is_committed_once_with_a_token_of_our_own(delivery: ClaimDelivery, sink: KeptSink) -> None:
    delivered(delivery, [log_unit("a"), log_unit("a"), split_unit("a", attempt=2), log_unit("b")])
    token = Token("q", "b", 1 << 16, 2 << 16, 3, generation=1)
    assert sorted(sink.commits, key=str) == [("public.a", replace(token, attempt=2), 8), ("public.b", token, 2)]


def test_no_batch_begins_once_it_was_told_to_stop(delivery: ClaimDelivery) -> None:
    reader, planner = reader_of(delivery, [log_unit("a")])
    Path(delivery.stop_file).touch()
    start = reader.initialOffset()
    assert reader.latestOffset(start, None) == start  # type: ignore[arg-type]
    assert planner.advanced == 0


def test_a_batch_without_units_commits_nothing(delivery: ClaimDelivery, sink: KeptSink) -> None:
    delivered(delivery, [])
    assert sink.commits == []


def test_a_table_that_cannot_be_committed_fails_the_batch_and_the_others_are_done(
    delivery: ClaimDelivery, sink: KeptSink
) -> None:
    sink.broken = True
    with pytest.raises(ToldError) as caught:
        delivered(delivery, [log_unit("a"), log_unit("b")])
    assert [name for name, _, _ in sink.commits] == ["public.b"]
    assert Failure.of_text("x", str(caught.value)) == Failure(
        "ConflictError", Remedy.PERSON, "Somebody else wrote.", "Look."
    )
    ClaimWriter(delivery).abort([], 0)
    assert len(sink.commits) == 1


def test_a_snapshot_that_is_gone_is_told_as_what_passes(
    delivery: ClaimDelivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expired(*_: object) -> Iterator[pa.RecordBatch]:
        yield BATCH
        raise SnapshotExpired("It is gone.")

    monkeypatch.setattr(claim_check, "read_history", expired)
    with pytest.raises(ToldError) as caught:
        delivered(delivery, [split_unit("a")])
    assert Failure.of_text("x", str(caught.value)).remedy is Remedy.RETRY


def test_a_delivery_travels_as_an_option_and_hides_the_source(delivery: ClaimDelivery) -> None:
    source = ClaimSource({claim_check.OPTION: delivery.to_option()})
    assert "secret" in claim_check.OPTION
    assert source.schema() == "claim BINARY"
    assert source.streamReader(None)._delivery == delivery
    assert "postgresql" not in repr(delivery)
    assert isinstance(pickle.loads(pickle.dumps(Claim(log_unit("a"), Token("q", "b", 0, 1, 2)))), Claim)
