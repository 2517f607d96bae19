"""Where a query begins that wants no history: an epoch, or a time."""

from __future__ import annotations

import pytest

from headwater.backfill.errors import InvalidQuery
from headwater.backfill.since import parse_since
from headwater.stream import Epoch


def test_s14_an_epoch_is_itself_and_a_time_the_epoch_that_it_falls_into() -> None:
    assert parse_since("65536") == (Epoch(65536), False)
    found, is_time = parse_since("2026-01-01T00:00:00Z")
    assert is_time
    assert found.to_datetime().isoformat() == "2026-01-01T00:00:00+00:00"


def test_s14_a_time_before_all_epochs_is_the_beginning() -> None:
    assert parse_since("2020-01-01T00:00:00Z") == (Epoch(0), True)


@pytest.mark.parametrize("text", ["yesterday", "2026-01-01T00:00:00", "-5", str(1 << 70)])
def test_s14_what_is_neither_is_refused_with_what_is_valid(text: str) -> None:
    with pytest.raises(InvalidQuery, match=r"neither an epoch nor a time.*with its zone"):
        parse_since(text)
