"""Where a query begins that wants no history: an epoch, or a time."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from headwater.backfill.errors import InvalidQuery
from headwater.backfill.since import epoch_since, parse_since
from headwater.stream import Epoch


def test_s14_an_epoch_is_itself_and_a_time_the_epoch_that_it_falls_into() -> None:
    assert epoch_since("65536") == (Epoch(65536), False)
    found, is_time = epoch_since("2026-01-01T00:00:00Z")
    assert is_time
    assert found.to_datetime().isoformat() == "2026-01-01T00:00:00+00:00"


def test_s14_a_time_before_all_epochs_is_the_beginning() -> None:
    assert epoch_since("2020-01-01T00:00:00Z") == (Epoch(0), True)


@pytest.mark.parametrize("text", ["yesterday", "-5", str(1 << 70)])
def test_s14_what_is_neither_is_refused_with_what_is_valid(text: str) -> None:
    with pytest.raises(InvalidQuery, match=r"neither an epoch nor a time.*with its zone"):
        epoch_since(text)


@pytest.mark.parametrize("text", ["2026-01-01T00:00:00", "2026-01-01", "2026-01-01 00:00"])
def test_s14_a_time_without_its_zone_is_refused_with_the_time_in_utc(text: str) -> None:
    with pytest.raises(InvalidQuery, match=r"without its zone.*2026-01-01T00:00:00Z if it is in UTC"):
        epoch_since(text)


def test_s14_a_version_or_a_time_of_an_upstream_table_is_read_as_it_is() -> None:
    assert parse_since("since", "42", "a version") == 42
    assert parse_since("since", "1970-01-01T01:00:00+01:00", "a version") == datetime(1970, 1, 1, tzinfo=UTC)
    with pytest.raises(InvalidQuery, match="neither a version nor a time"):
        parse_since("since", "yesterday", "a version")
