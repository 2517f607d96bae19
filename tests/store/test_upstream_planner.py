"""The planner over a Delta table: what is durable, what comes again after a crash, and what a person asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.store.test_delta_upstream import Lake, Rows

from headwater import failpoints
from headwater.backfill.control import status
from headwater.backfill.errors import InvalidQuery, QueryStateLost
from headwater.backfill.offset import QueryOffset
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.backfill.reader import read_upstream
from headwater.backfill.snapshot.consume_upstream.delta import DeltaUpstream, epoch_of
from headwater.backfill.snapshot.consume_upstream.errors import InvalidUpstream, SinceOutOfRange
from headwater.backfill.units import UpstreamUnit
from headwater.control.command import PauseBackfill, QueryCommand, ResnapshotTable, ResumeBackfill, ThrottleBackfill
from headwater.control.request import Request, leave
from headwater.log_store.columns import OP
from headwater.stream import Op


class Crash(Exception):
    """The process is gone."""


class Query:
    """A query as Spark runs it: the offset is kept before the batch is read, and committed after it."""

    def __init__(self, lake: Lake, store: Path, **fields: object) -> None:
        self.lake, self.fields, self.slots = lake, dict(fields), 2
        self.made = QueryOptions.over(lake.upstream(), str(store), "copy", **fields)  # type: ignore[arg-type]
        self.rows: Rows = {}
        self.batches = 0
        self.offset: QueryOffset | None = None
        self.logged: QueryOffset | None = None
        self.planner = QueryPlanner(self.made, slots=lambda: self.slots)

    def batch(self, *, crash: str = "") -> bool:
        """One batch; whether there was one."""
        planner = self.planner
        start = self.offset or planner.initial()
        end = self.logged or planner.plan(start)
        if end == start:
            return False
        if crash == "before logged":
            raise Crash
        self.logged = end
        units = [unit for unit in planner.units(start, end) if isinstance(unit, UpstreamUnit)]
        staged = [batch for unit in units for batch in read_upstream(self.lake.upstream(), unit)]
        if crash == "before committed":
            raise Crash
        if any(unit.replaces for unit in units):
            self.rows.clear()
        for batch in staged:
            for row in batch.to_pylist():
                if Op(row[OP]) in (Op.INSERT, Op.UPDATE_INSERT):
                    assert row["id"] not in self.rows
                    self.rows[row["id"]] = row["v"]
                else:
                    assert self.rows.pop(row["id"]) == row["v"]
        self.batches += 1
        self.offset, self.logged = end, None
        return True

    def again(self, slots: int = 2, **fields: object) -> None:
        """The process is started anew."""
        self.planner.close()
        self.fields |= fields
        self.slots = slots
        self.made = QueryOptions.over(self.lake.upstream(), self.made.store, "copy", **self.fields)  # type: ignore[arg-type]
        self.planner = QueryPlanner(self.made, slots=lambda: self.slots)

    def drain(self) -> None:
        while self.batch():
            pass

    def ask(self, command: QueryCommand) -> None:
        leave(self.made.state_location, Request(command, "copy"))
        self.planner._requests._inbox._looked = -1e9  # some time has passed
        self.batch()

    @property
    def status(self) -> dict[str, object]:
        found = status(self.made.state_location, "copy")
        assert found is not None
        return found.value


@contextmanager
def running(lake: Lake, store: Path, **fields: object) -> Iterator[Query]:
    made = Query(lake, store, **fields)
    try:
        yield made
    finally:
        made.planner.close()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "orders", {key: f"v{key}" for key in range(500)})


def at(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()


def rows_of(lake: Lake) -> Rows:
    found = lake.delta.to_pyarrow_table().to_pydict()
    return dict(zip(found["id"], found["v"], strict=True))


def test_a_table_and_every_version_after_it(lake: Lake, tmp_path: Path) -> None:
    with running(lake, tmp_path / "store") as query:
        query.drain()
        assert query.rows == rows_of(lake)
        lake.merge({1: "x", 1000: "new"})
        lake.delta.delete("id < 100 and id > 50")
        lake.overwrite({2: "v2", 3: "other"})
        query.drain()
        assert query.rows == rows_of(lake) == {2: "v2", 3: "other"}
        told = query.planner.status()
        assert (told["consumed_version"], told["snapshot_rows"], told["phase"]) == (3, 500, "resolving next epoch")


@pytest.mark.parametrize("crash", ["before logged", "before committed"])
def test_a_batch_that_was_not_delivered_comes_again(lake: Lake, tmp_path: Path, crash: str) -> None:
    with running(lake, tmp_path / "store", max_rows=100) as query:
        for _ in range(2):
            query.batch()
        with pytest.raises(Crash):
            query.batch(crash=crash)
        query.again()
        query.drain()
        assert query.batches >= 5
        lake.merge({1: "x"})
        with pytest.raises(Crash):
            query.batch(crash=crash)
        lake.merge({1: "y"})
        query.again()
        query.drain()
        assert query.rows == rows_of(lake)


@pytest.mark.parametrize("point", ["query.before_save", "query.after_save", "upstream.before_hold"])
def test_a_crash_at_each_durable_step_loses_and_repeats_nothing(lake: Lake, tmp_path: Path, point: str) -> None:
    for number in (1, 3, 4):
        store = tmp_path / f"store{number}"
        with running(lake, store, max_rows=60) as query:
            failpoints.arm(f"{point}=raise@{number + 1}")
            try:
                query.drain()
            except failpoints.FailpointError:
                pass
            finally:
                failpoints.arm("")
            query.again()
            query.drain()
            lake.merge({number: f"again{number}"})
            query.drain()
            assert query.rows == rows_of(lake)


def test_other_parallelism_at_any_time(lake: Lake, tmp_path: Path) -> None:
    """M3: tasks read other ranges of vnodes from one batch to the next."""
    with running(lake, tmp_path / "store", max_rows=90) as query:
        for parallelism in (1, 5, 3, 256, 2):
            query.again(parallelism, max_rows=90)
            query.batch()
        query.drain()
        lake.overwrite(dict.fromkeys(range(100), "all"))
        query.again(7)
        query.drain()
        assert query.rows == rows_of(lake)


def test_m7_pause_resume_and_throttle_are_kept_over_restarts(lake: Lake, tmp_path: Path) -> None:
    with running(lake, tmp_path / "store", max_rows=90) as query:
        query.batch()
        query.ask(PauseBackfill())
        before = dict(query.rows)
        query.again()
        assert not query.batch()
        assert query.rows == before
        query.ask(ResumeBackfill())
        query.ask(ThrottleBackfill(0))
        query.again()
        assert not query.batch()
        assert query.planner.status()["limit"] == 0
        query.ask(ThrottleBackfill(None))
        query.drain()
        assert query.rows == rows_of(lake)


def test_s9_m10_a_retention_miss_is_seen_and_the_command_mends_it(lake: Lake, tmp_path: Path) -> None:
    """S9: the consumer is down for longer than the retention; no loop, the old rows stay. M10: the user acts."""
    store = tmp_path / "the store"
    with running(lake, store) as query:
        query.drain()
        kept = dict(query.rows)
        lake.overwrite({1: "x"})
        lake.overwrite({1: "y", 2: "z"})
        lake.vacuum()
        for _ in range(3):
            query.again()
            assert not query.batch()
            assert query.planner.status()["phase"] == "stopped"
        assert query.rows == kept
        assert query.status["phase"] == "stopped"
        command = f"headwater resnapshot --store '{store}' --query copy"
        assert command in str(query.status["next_step"])
        told = "".join(path.read_text() for path in (store / "journal").rglob("*.jsonl"))
        assert command in told
        assert "upstream_stopped" in told
        query.ask(ResnapshotTable())
        query.drain()
        assert query.rows == rows_of(lake) == {1: "y", 2: "z"}
        lake.append({3: "more"})
        query.drain()
        assert query.rows == rows_of(lake)
        assert query.planner.status()["problem"] is None


def test_m10_a_plan_that_expires_before_it_is_read_stops_for_good(lake: Lake, tmp_path: Path) -> None:
    """It was planned, its rows were never delivered, and they are gone: what follows may not come without them."""
    with running(lake, tmp_path / "store") as query:
        query.drain()
        lake.overwrite({1: "x"})
        with pytest.raises(Crash):
            query.batch(crash="before committed")
        lake.overwrite({1: "y"})
        lake.vacuum()
        query.again()
        query.batch()
        lake.append({5: "five"})
        for _ in range(2):
            assert not query.batch()
            assert query.planner.status()["phase"] == "stopped"
            query.again()
        query.ask(ResnapshotTable())
        query.drain()
        assert query.rows == rows_of(lake)


def test_a_table_made_anew_in_its_place_stops(lake: Lake, tmp_path: Path) -> None:
    import shutil

    with running(lake, tmp_path / "store") as query:
        query.drain()
        shutil.rmtree(lake.path)
        anew = Lake(Path(lake.path), {7: "seven"})
        anew.append({8: "eight"})
        assert not query.batch()
        assert query.planner.status()["phase"] == "stopped"
        query.ask(ResnapshotTable())
        query.drain()
        assert query.rows == {7: "seven", 8: "eight"}
        shutil.rmtree(lake.path)
        Lake(Path(lake.path), {7: "another"}).append({9: "nine"})
        query.ask(ResnapshotTable())
        query.drain()
        assert query.rows == {7: "another", 9: "nine"}, "nothing is remembered of the versions of the other table"


def test_a_new_snapshot_of_an_empty_table_empties_what_was_delivered(lake: Lake, tmp_path: Path) -> None:
    with running(lake, tmp_path / "store") as query:
        query.drain()
        lake.delta.delete()
        query.ask(ResnapshotTable())
        query.drain()
        assert query.rows == {}


def test_s14_since_is_resolved_and_checked(lake: Lake, tmp_path: Path) -> None:
    lake.append({1000: "a"})
    lake.append({1001: "b"})
    with running(lake, tmp_path / "one", since=str(epoch_of(1))) as query:
        query.drain()
        assert query.rows == {1001: "b"}
    time_ms = lake.upstream().commit_time_us(epoch_of(1)) // 1000
    with running(lake, tmp_path / "two", since=at(time_ms)) as query:
        query.drain()
        assert query.rows == {1000: "a", 1001: "b"}, "what was committed at that very time is from that time on"
    with pytest.raises(SinceOutOfRange, match="no version from before that time"):
        Query(lake, tmp_path / "first", since=at(1))
    with running(lake, tmp_path / "newest", since=str(epoch_of(2))) as query:
        query.drain()
        assert query.rows == {}
        lake.append({1002: "c"})
        query.drain()
        assert query.rows == {1002: "c"}
    with pytest.raises(SinceOutOfRange, match="has no version 9 yet"):
        Query(lake, tmp_path / "early", since=str(epoch_of(9)))
    with pytest.raises(SinceOutOfRange, match="from that time on"):
        Query(lake, tmp_path / "future", since=at(time_ms + 3_600_000))
    lake.overwrite({1: "x"})
    lake.overwrite({1: "y"})
    lake.vacuum()
    with pytest.raises(SinceOutOfRange, match="cannot be read"):
        Query(lake, tmp_path / "late", since=str(epoch_of(3)))
    with pytest.raises(InvalidQuery, match="neither an epoch nor a time"):
        Query(lake, tmp_path / "word", since="yesterday")


def test_s14_since_on_a_table_without_a_change_feed_is_refused_with_the_statement(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "plain", {1: "a"}, {})
    lake.append({2: "b"})
    for number, since in enumerate((epoch_of(0), epoch_of(1))):
        with pytest.raises(InvalidUpstream, match=r"writes no change data feed\. Run: ALTER TABLE"):
            Query(lake, tmp_path / f"state{number}", since=str(since))
    lake.delta.alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    with pytest.raises(InvalidUpstream, match=r"at version 1: it was turned on later\. Begin at a later version"):
        Query(lake, tmp_path / "early", since=str(epoch_of(0)))
    lake.append({3: "c"})
    with running(lake, tmp_path / "after", since=str(epoch_of(2))) as query:
        query.drain()
        assert query.rows == {3: "c"}


def test_a_checkpoint_and_a_state_that_do_not_fit_are_told_apart(lake: Lake, tmp_path: Path) -> None:
    with running(lake, tmp_path / "store", max_rows=100) as query:
        query.drain()
        with pytest.raises(QueryStateLost, match="lost or replaced"):
            query.planner.plan(QueryOffset(0, 99))
        with pytest.raises(QueryStateLost, match="older"):
            query.planner.plan(QueryOffset(0, 1))
    with pytest.raises(InvalidQuery):
        QueryPlanner(QueryOptions.over(DeltaUpstream(lake.path, ("id",), vnode_count=16), query.made.store, "copy"))
