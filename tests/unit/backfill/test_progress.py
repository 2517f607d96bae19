"""Progress of tables and queries, and the rate at which history is handed out."""

from __future__ import annotations

import json

import pytest

from headwater.backfill.progress import Phase, RecentRate, TableProgress, merged
from headwater.backfill.rate_limit import NO_LIMIT, RateLimit
from headwater.stream import BarrierError


def test_a_rate_allows_so_many_rows_and_one_burst_more() -> None:
    limit = RateLimit(10, burst_seconds=4.0)
    assert limit.allowed(0.0) == 40
    limit.take(40, 0.0)
    assert [limit.allowed(second) for second in (0.0, 0.05, 1.0, 4.0, 99.0)] == [0, 0, 10, 40, 40]


def test_more_than_was_allowed_is_owed() -> None:
    limit = RateLimit(10, burst_seconds=1.0)
    limit.take(100, 0.0)
    assert (limit.allowed(9.0), limit.allowed(9.5), limit.allowed(10.0)) == (0, 5, 10)


def test_a_rate_is_changed_while_it_runs_and_0_stands_still() -> None:
    limit = RateLimit(None)
    assert limit.allowed(0.0) == NO_LIMIT
    limit.change(0, 1.0)
    assert limit.allowed(100.0) == 0
    limit.change(5, 100.0)
    assert limit.allowed(100.0) == 5
    limit.change(None, 100.0)
    assert (limit.allowed(100.0), limit.rows_per_second) == (NO_LIMIT, None)
    with pytest.raises(BarrierError):
        limit.change(-1, 100.0)


def test_the_recent_rate_forgets_what_is_older_than_a_minute() -> None:
    rate = RecentRate()
    assert rate.per_second() is None
    for second in range(300):
        rate.note(1000 * min(second, 100), float(second))
    assert rate.per_second() == 0.0
    rate.note(100_000 + 6_000, 300.0)
    assert rate.per_second() == pytest.approx(100.0, rel=0.05)


def test_rows_that_were_just_handed_out_are_no_rate_yet() -> None:
    rate = RecentRate()
    rate.note(0, 10.0)
    rate.note(150_000, 10.03)
    assert rate.per_second() is None
    rate.note(150_000, 14.0)
    assert rate.per_second() == pytest.approx(37_500.0)


def test_progress_is_the_same_after_json() -> None:
    told = TableProgress("public.t", Phase.READING, rows=5, total_rows=10, eta_seconds=2.5, paused=True, limit=0)
    assert TableProgress.from_json(json.loads(json.dumps(told.to_json()))) == told
    assert told.fraction == 0.5


def test_a_query_is_where_its_slowest_table_is() -> None:
    parts = [
        TableProgress("a", Phase.DONE, rows=100, total_rows=100, total_splits=2, splits=2),
        TableProgress("b", Phase.READING, rows=50, total_rows=150, rows_per_second=10.0, total_splits=3, splits=1),
    ]
    whole = merged("q", parts)
    assert (whole.phase, whole.rows, whole.total_rows) == (Phase.READING, 150, 250)
    assert (whole.eta_seconds, whole.splits, whole.total_splits) == (10.0, 3, 5)
    waiting = TableProgress("c", Phase.WAITING, waiting="paused", paused=True)
    more = merged("q", [*parts, waiting])
    assert (more.phase, more.total_rows, more.eta_seconds, more.waiting) == (Phase.READING, None, None, "paused")
    assert not more.paused
    assert merged("q", [waiting]).paused
    assert merged("q", []).phase is Phase.DONE
