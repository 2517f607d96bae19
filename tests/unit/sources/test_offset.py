"""Positions: the order of commits, JSON of all ages, and what may not be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest

from headwater.sources.errors import ForeignOffset, InvalidOffset
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.offset import END_OF_TRANSACTION, Lsn, PostgresOffset, positions_of


def read(fields: dict[str, Any]) -> PostgresOffset:
    made = CdcOffset.from_json(json.dumps({"Postgres": fields}))
    assert isinstance(made, PostgresOffset)
    return made


class Elsewhere(CdcOffset):
    """A place in another kind of source."""

    kind: ClassVar[str] = "Elsewhere"
    __slots__ = ()

    def rank(self) -> tuple[int, ...]:
        return (1,)

    def position_after(self, last: bytes | None) -> bytes:
        return last or b""

    def to_fields(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Elsewhere:
        return cls()


@pytest.mark.parametrize("text", ["0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF", "1/0", "0/10"])
def test_an_lsn_reads_what_it_writes(text: str) -> None:
    assert str(Lsn.parse(text)) == text
    assert repr(Lsn.parse(text)) == text


def test_an_lsn_is_a_number_of_bytes() -> None:
    assert Lsn.parse("16/B374D848") == 0x16_B374_D848
    assert Lsn.parse("1/0") - Lsn.parse("0/FFFFFFFF") == 1


@pytest.mark.parametrize("text", ["", "1", "1/", "/1", "1/2/3", "g/1", "123456789/0", "1/ 2", "-1/0", "１/0"])
def test_other_texts_are_no_lsn(text: str) -> None:
    with pytest.raises(InvalidOffset):
        Lsn.parse(text)


def test_places_are_ordered_by_commit_then_row_then_end() -> None:
    """Scenario C16: commit first, then the place in the transaction; equal places are equal."""
    places = [
        PostgresOffset.at(100),
        PostgresOffset.of_row(100, 0, 7),
        PostgresOffset.of_row(100, 1, 7),
        PostgresOffset.end_of(100, 140, 7),
        PostgresOffset.at(101),
        PostgresOffset.of_row(200, 0, 6),
    ]
    assert sorted(places[3:] + places[:3]) == places
    assert all(before < after for before, after in pairwise(places))
    assert PostgresOffset.of_row(100, 1, 7) == PostgresOffset.of_row(100, 1, 7)
    assert hash(PostgresOffset.of_row(100, 1, 7)) == hash(PostgresOffset.of_row(100, 1, 7))


def test_places_of_older_state_are_ordered_by_commit_then_record() -> None:
    """Scenario C16: commit then proc, a missing commit before all; places with an LSN alone by that."""
    nothing = read({"txid": 1, "lsn": 50, "lsn_commit": None, "lsn_proc": 60})
    early = read({"txid": 1, "lsn": 90, "lsn_commit": 100, "lsn_proc": 110})
    later = read({"txid": 2, "lsn": 80, "lsn_commit": 100, "lsn_proc": 120})
    next_commit = read({"txid": 3, "lsn": 70, "lsn_commit": 130, "lsn_proc": 65})
    assert nothing < early < later < next_commit
    assert early == read({"txid": 9, "lsn": 1, "lsn_commit": 100, "lsn_proc": 110})
    assert read({"txid": 1, "lsn": 10}) < read({"txid": 1, "lsn": 11, "lsn_commit": None, "lsn_proc": None})
    assert read({"lsn": 10}) == PostgresOffset.at(10)


def test_a_place_of_older_state_is_before_the_rows_of_its_transaction() -> None:
    old = read({"txid": 2, "lsn": 105, "lsn_commit": 100, "lsn_proc": 105})
    assert PostgresOffset.end_of(100, 104, 1) < old < PostgresOffset.of_row(101, 0, 2)
    assert not old.is_boundary


def test_the_mixed_order_is_transitive() -> None:
    forms = [
        *(PostgresOffset.at(lsn) for lsn in (5, 10, 15)),
        *(PostgresOffset.of_row(lsn, seq, 1) for lsn in (5, 10) for seq in (0, 3)),
        *(PostgresOffset.end_of(lsn, lsn + 1, 1) for lsn in (5, 10)),
        *(read({"lsn": 1, "lsn_commit": commit, "lsn_proc": proc}) for commit in (None, 5, 10) for proc in (3, 20)),
    ]
    for one in forms:
        for two in forms:
            assert (one < two) + (one == two) + (one > two) == 1
            for three in forms:
                assert not (one <= two <= three) or one <= three


def test_a_stream_goes_on_but_never_back() -> None:
    """Scenario C18: what lies behind is before the stored place, equal and forward are not; transactions interleave."""
    stored = PostgresOffset.of_row(100, 5, 7)
    onward = (PostgresOffset.of_row(100, 5, 7), PostgresOffset.of_row(100, 6, 7), PostgresOffset.end_of(200, 201, 3))
    assert all(place >= stored for place in onward)
    assert all(place < stored for place in (PostgresOffset.of_row(100, 4, 7), PostgresOffset.end_of(99, 100, 9)))
    old = read({"txid": 1, "lsn": 60, "lsn_commit": 50, "lsn_proc": 60})
    assert read({"txid": 2, "lsn": 40, "lsn_commit": 70, "lsn_proc": 40}) >= old
    assert read({"txid": 2, "lsn": 59, "lsn_commit": 50, "lsn_proc": 59}) < old


@pytest.mark.parametrize(
    "place",
    [
        PostgresOffset.at(29_973_552, 1046),
        PostgresOffset.at(0),
        PostgresOffset.of_row(2**64 - 1, 0, 2**32 - 1),
        PostgresOffset.end_of(29_973_600, 29_973_640, 1046),
        PostgresOffset.from_fields({"txid": None, "lsn": 1, "lsn_commit": 2, "lsn_proc": 3}),
    ],
)
def test_json_gives_back_what_it_was_made_of(place: PostgresOffset) -> None:
    back = CdcOffset.from_json(place.to_json())
    assert isinstance(back, PostgresOffset)
    assert (back.lsn, back.commit_lsn, back.seq, back.xid, back.proc_lsn) == (
        place.lsn,
        place.commit_lsn,
        place.seq,
        place.xid,
        place.proc_lsn,
    )
    assert back.to_json() == place.to_json()


def test_the_json_form_is_durable() -> None:
    assert PostgresOffset.end_of(29_973_600, 29_973_640, 1046).to_json() == (
        '{"Postgres":{"lsn":29973640,"lsn_commit":29973600,"seq":4294967295,"txid":1046}}'
    )
    assert PostgresOffset.at(29_973_600).to_json() == '{"Postgres":{"lsn":29973600,"txid":null}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "1",
        "{}",
        '{"Postgres":1}',
        '{"Postgres":{}}',
        '{"Postgres":{"lsn":"1"}}',
        '{"Postgres":{"lsn":true}}',
        '{"Postgres":{"lsn":-1}}',
        '{"Postgres":{"lsn":18446744073709551616}}',
        '{"Postgres":{"lsn":1,"seq":1}}',
        '{"Postgres":{"lsn":1,"lsn_commit":1,"seq":4294967296}}',
        '{"Postgres":{"lsn":1,"lsn_commit":1}}',
        '{"Postgres":{"lsn":1},"MySql":{}}',
        '{"Oracle":{"scn":1}}',
    ],
)
def test_other_texts_are_no_position(text: str) -> None:
    with pytest.raises(InvalidOffset):
        CdcOffset.from_json(text)


def test_positions_of_two_kinds_have_no_order() -> None:
    here, there = PostgresOffset.at(1), Elsewhere()
    assert here != there
    for compare in ("__lt__", "__le__", "__gt__", "__ge__"):
        with pytest.raises(ForeignOffset):
            getattr(here, compare)(there)
        with pytest.raises(ForeignOffset):
            getattr(there, compare)(here)
    with pytest.raises(ForeignOffset):
        assert here < 1


def test_the_bytes_of_positions_sort_as_the_positions() -> None:
    lsns = np.array([1, 255, 256, 256, 2**40, 2**63], np.uint64)
    seqs = np.array([0, 9, 1, 256, 0, END_OF_TRANSACTION], np.uint32)
    xids = np.array([9, 8, 7, 6, 5, 4], np.uint32)
    column = positions_of(lsns, seqs, xids).to_pylist()
    assert column == sorted(column)
    offsets = [PostgresOffset.from_position(position) for position in column]
    assert offsets == sorted(offsets)
    assert [(o.commit_lsn, o.seq, o.xid) for o in offsets] == list(
        zip(lsns.tolist(), seqs.tolist(), xids.tolist(), strict=True)
    )
    assert len(positions_of(lsns[:0], seqs[:0], xids[:0])) == 0


def test_other_bytes_are_no_position() -> None:
    with pytest.raises(InvalidOffset):
        PostgresOffset.from_position(b"short")


def position(commit_lsn: int, seq: int, xid: int) -> bytes:
    column = positions_of(np.array([commit_lsn], np.uint64), np.array([seq], np.uint32), np.array([xid], np.uint32))
    return bytes(column[0].as_py())


def test_history_lies_between_the_last_change_and_every_later_one() -> None:
    since = PostgresOffset.at(1000)
    last = position(2000, 7, 55)
    later = position(2034, 0, 56)
    assert last < since.position_after(last) < later
    assert since.position_after(None) < position(1000, 0, 54)
