"""Places in logs that streams write."""

from __future__ import annotations

import pytest

from headwater.sources.errors import ForeignOffset, InvalidOffset, NoDatabase
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.snapshots import open_snapshots
from headwater.sources.written import WrittenOffset, positions_of


def test_a_place_is_kept_as_json_and_ordered_by_its_epoch() -> None:
    place = WrittenOffset(65536)
    assert place.to_json() == '{"Written":{"epoch":65536}}'
    assert CdcOffset.from_json(place.to_json()) == place
    assert place < WrittenOffset(131072)
    with pytest.raises(ForeignOffset):
        _ = place < PostgresOffset.at(1)


@pytest.mark.parametrize("text", ['{"Written":{}}', '{"Written":{"epoch":-1}}', '{"Written":{"epoch":"1"}}'])
def test_a_text_that_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(InvalidOffset):
        CdcOffset.from_json(text)


def test_positions_sort_as_rows_were_written() -> None:
    rows = [*positions_of(65536, 0, 3).to_pylist(), *positions_of(65536, 3, 300).to_pylist()]
    rows += positions_of(131072, 0, 2).to_pylist()
    assert rows == sorted(set(rows))
    assert rows[-1] == (131072).to_bytes(8, "big") + (1).to_bytes(4, "big") + bytes(4)


def test_where_there_is_no_database_nothing_can_be_asked_of_it() -> None:
    with pytest.raises(NoDatabase, match="history=false"):
        open_snapshots("").export()
