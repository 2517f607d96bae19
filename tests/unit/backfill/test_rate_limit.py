"""RowRate, with a clock that the test moves."""

from __future__ import annotations

from headwater.backfill.rate_limit import RowRate


def test_a_rate_is_kept_over_any_time() -> None:
    rate = RowRate(10)
    assert rate.wait(5.0) == 0
    rate.take(30, 5.0)
    assert rate.wait(5.0) == 3.0
    assert rate.wait(7.5) == 0.5
    assert rate.wait(100.0) == 0
    rate.take(10, 100.0)
    assert rate.wait(100.0) == 1.0, "what was not used is not saved up"
    rate.change(0, 100.5)
    assert rate.wait(101.0) is None
    rate.change(5, 200.0)
    assert rate.wait(200.0) == 1.0, "what was owed before the pause is owed still"
    rate.change(None, 200.0)
    assert rate.wait(200.0) == 0
