"""A query over a table that we keep: its snapshot, its net changes, and what is held for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.store.sinks.file_sinks import DELETE, INSERT, UPDATE, table_of
from tests.store.versioned.written import WrittenTable

from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.backfill.reader import read_upstream
from headwater.backfill.snapshot.consume_upstream.errors import SinceOutOfRange, UpstreamDropped, UpstreamWaits
from headwater.backfill.snapshot.consume_upstream.versioned import VersionedUpstream
from headwater.backfill.units import UpstreamUnit
from headwater.log_store.columns import OP
from headwater.log_store.log_events import RENEWED, SCHEMA
from headwater.stream import Op
from headwater.stream.epoch import ORIGIN
from headwater.versioned.folder import TableFolder
from headwater.versioned.pins import may_read

NUMBERS = table_of({"id": pa.int64(), "v": pa.int64()}, name="numbers")
Rows = dict[int, int]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[WrittenTable]:
    made = WrittenTable(tmp_path / "kept", NUMBERS)
    made.history([{"id": key, "v": key} for key in range(100)])
    yield made
    made.close()


def query_of(kept: WrittenTable, tmp_path: Path) -> QueryOptions:
    upstream = VersionedUpstream(kept.location, NUMBERS.full_name, str(kept.root))
    return QueryOptions.over(upstream, str(tmp_path / "state"), "copy of numbers")


def drained(planner: QueryPlanner, query: QueryOptions, rows: Rows) -> None:
    """Deliver to *rows* all that there is; each row must fit."""
    upstream = query.upstream
    assert upstream is not None
    start = planner.initial()
    while (end := planner.plan(start)) != start:
        for unit in planner.units(start, end):
            assert isinstance(unit, UpstreamUnit)
            for batch in read_upstream(upstream, unit):
                for row in batch.to_pylist():
                    if Op(row[OP]) in (Op.INSERT, Op.UPDATE_INSERT):
                        assert row["id"] not in rows
                        rows[row["id"]] = row["v"]
                    else:
                        assert rows.pop(row["id"]) == row["v"]
        start = end
        planner.initial()


def test_m6_a_kept_table_is_consumed_and_holds_what_the_query_needs(kept: WrittenTable, tmp_path: Path) -> None:
    query = query_of(kept, tmp_path)
    rows: Rows = {}
    planner = QueryPlanner(query, slots=lambda: 3)
    begun = planner.newest_epoch()
    for number in range(5):
        kept.write((UPDATE, {"id": 1, "v": number}), (INSERT, {"id": 1000 + number, "v": 0}))
    kept.write((DELETE, {"id": 2, "v": 2}))
    assert kept.fold() == begun, "the base does not go past what the query needs"
    (pin,) = kept.open().pins()
    assert (pin.owner, pin.epoch) == ("copy of numbers", begun)
    drained(planner, query, rows)
    assert rows == {key: key for key in range(100) if key != 2} | {1: 4} | {1000 + number: 0 for number in range(5)}
    assert kept.fold() == kept.newest, "what was delivered is held no longer"
    planner.close()
    kept.write((UPDATE, {"id": 3, "v": 33}))
    kept.fold()
    again = QueryPlanner(query, slots=lambda: 3)
    drained(again, query, rows)
    assert rows[3] == 33
    again.close()


def test_a_plan_that_a_crash_left_undelivered_stays_readable(kept: WrittenTable, tmp_path: Path) -> None:
    query = query_of(kept, tmp_path)
    rows: Rows = {}
    planner = QueryPlanner(query, slots=lambda: 3)
    drained(planner, query, rows)
    kept.write((UPDATE, {"id": 1, "v": 100}))
    planner.plan(planner.initial())
    planner.close()
    again = QueryPlanner(query, slots=lambda: 3)
    kept.write((UPDATE, {"id": 2, "v": 200}))
    kept.fold()
    drained(again, query, rows)
    assert again.status()["phase"] != "stopped"
    assert (rows[1], rows[2]) == (100, 200)
    again.close()


def test_a_table_that_must_be_read_once_more_is_held_no_longer_than_it_can_be_followed(
    kept: WrittenTable, tmp_path: Path
) -> None:
    query = query_of(kept, tmp_path)
    rows: Rows = {}
    planner = QueryPlanner(query, slots=lambda: 3)
    kept.write((UPDATE, {"id": 1, "v": 100}))
    kept._writer.note(SCHEMA, {RENEWED: "0/1"})  # it is captured anew after a gap
    kept.write((UPDATE, {"id": 1, "v": 101}))
    place = (kept.root, TableFolder(kept.root, NUMBERS.full_name).path, NUMBERS.full_name)
    assert may_read(*place, wanted=True) is not None
    drained(planner, query, rows)
    assert rows[1] == 100, "all that can be told by changes"
    assert may_read(*place, wanted=True) is None
    may_read(*place, wanted=False)  # it was read
    kept.fold()
    kept.write((UPDATE, {"id": 1, "v": 102}))
    drained(planner, query, rows)
    assert planner.status()["phase"] == "stopped"
    assert "resnapshot" in str(planner.status()["next_step"])
    planner.close()


def test_a_table_that_is_being_read_is_waited_for_and_that_is_told(kept: WrittenTable, tmp_path: Path) -> None:
    query = query_of(kept, tmp_path)
    rows: Rows = {}
    planner = QueryPlanner(query, slots=lambda: 3)
    drained(planner, query, rows)
    assert query.upstream is not None
    query.upstream.release(query.query)
    kept.sink.incomplete(NUMBERS, "keep", "b1", {"rows": 3, "total": 100})
    kept.write((UPDATE, {"id": 1, "v": 100}))
    start = planner.initial()
    assert planner.plan(start) == start
    told = planner.status()
    assert "not kept as a whole yet (3 of about 100 rows)" in told["problem"]
    assert "headwater status" in told["next_step"]
    assert told["phase"] != "stopped"
    with pytest.raises(UpstreamWaits, match="not kept as a whole yet"):
        QueryPlanner(replace(query, query="another", store=str(tmp_path / "other")), slots=lambda: 3)
    kept.complete()
    assert planner.plan(start) == start, "what lies between cannot be told by changes"
    assert planner.status()["phase"] == "stopped"
    planner.close()


def test_a_time_whose_changes_are_folded_is_refused_as_no_longer_kept(kept: WrittenTable, tmp_path: Path) -> None:
    kept.write((UPDATE, {"id": 1, "v": 100}))
    kept.fold()
    query = replace(query_of(kept, tmp_path), history=False, since=ORIGIN.isoformat())
    with pytest.raises(SinceOutOfRange, match=r"no longer kept.*Begin later"):
        QueryPlanner(query, slots=lambda: 3)


def test_a_table_that_is_not_kept_is_told(tmp_path: Path, kept: WrittenTable) -> None:
    with pytest.raises(UpstreamDropped):
        VersionedUpstream(kept.location, "public.nothing", str(kept.root)).newest_epoch()
