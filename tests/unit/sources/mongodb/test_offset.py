"""Positions of MongoDB: ordered by cluster time, resumed by tokens that nobody orders."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headwater.sources.errors import ForeignOffset, InvalidOffset
from headwater.sources.mongodb.offset import (
    POSITION_DTYPE,
    UNKNOWN,
    MongoMark,
    MongoOffset,
    is_same_event,
    positions_of,
    seen_codes,
    seen_times,
    token_document,
    token_text,
    token_time,
)
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.snapshots import mark_from_json

TOKEN = "826AFB3873000000042B0429296E1404"
TIME = 0x6AFB3873 << 32 | 4


def test_the_cluster_time_orders_and_the_token_does_not() -> None:
    assert MongoOffset(5, "ff") < MongoOffset(6, "00")
    assert MongoOffset(5, "ff") == MongoOffset(5, "00") == MongoOffset(5, moment=7)
    assert hash(MongoOffset(5, "ff")) == hash(MongoOffset(5))
    assert MongoOffset(5, seq=9) < MongoOffset(5) < MongoOffset(6, seq=0)


def test_the_json_form_is_read_back() -> None:
    for offset in (
        MongoOffset(TIME, TOKEN),
        MongoOffset(TIME),
        MongoOffset(TIME, TOKEN, 3),
        MongoOffset(1, moment=5),
        MongoOffset(TIME, TOKEN, events={"shop": TOKEN, "stock": "82"}),
    ):
        read = CdcOffset.from_json(offset.to_json())
        assert isinstance(read, MongoOffset)
        assert read.to_fields() == offset.to_fields()
        assert (read.time, read.token, read.seq) == (offset.time, offset.token, offset.seq)
        assert (read.moment, read.events) == (offset.moment, offset.events)
    assert json.loads(MongoOffset(TIME, TOKEN).to_json()) == {
        "MongoDb": {"seconds": 0x6AFB3873, "ordinal": 4, "token": TOKEN}
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seconds": 1},
        {"seconds": 1, "ordinal": -1},
        {"seconds": 1 << 32, "ordinal": 0},
        {"seconds": "1", "ordinal": 0},
        {"seconds": 1, "ordinal": 0, "token": 5},
        {"seconds": 1, "ordinal": 0, "seq": -1},
        {"seconds": 1, "ordinal": 0, "moment": "x"},
        {"seconds": 1, "ordinal": 0, "event": 5},
        {"seconds": 1, "ordinal": 0, "events": "82"},
        {"seconds": 1, "ordinal": 0, "events": {"shop": 5}},
    ],
)
def test_fields_that_are_no_place_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidOffset):
        CdcOffset.from_json(json.dumps({"MongoDb": fields}))


def test_positions_of_other_databases_have_no_order_with_it() -> None:
    with pytest.raises(ForeignOffset):
        _ = MongoOffset(1) < PostgresOffset.at(1)


def test_the_bytes_of_rows_sort_as_their_places_and_history_lies_between() -> None:
    positions = positions_of(np.array([5, 5, 6], np.uint64), np.array([0, 7, 0], np.uint32)).to_pylist()
    assert positions == sorted(positions)
    assert positions[1] < MongoOffset(5).position_after(None) < positions[2]
    assert positions[0] < MongoOffset(5).position_after(positions[0]) < positions[1]
    with pytest.raises(InvalidOffset):
        MongoOffset(5).position_after(b"short")


def test_a_token_that_a_person_gives_begins_with_what_follows_it() -> None:
    start = MongoOffset.from_token(TOKEN)
    assert start.token == TOKEN
    assert start.time == TIME - 1  # others may have the same time, and none of it was told
    for text in ("", "xyz", "82", "00" + TOKEN[2:]):
        with pytest.raises(InvalidOffset):
            MongoOffset.from_token(text)
    assert token_time("not hexadecimal....") is None


def test_a_token_keeps_its_type_bits() -> None:
    for token in ({"_data": TOKEN}, {"_data": TOKEN, "_typeBits": b"\x01\x80"}):
        assert token_document(token_text(token)) == token


def test_a_snapshot_contains_what_committed_at_its_time_or_before() -> None:
    mark = MongoMark(MongoOffset(6))
    positions = positions_of(np.array([5, 6, 6, 7], np.uint64), np.array([0, 0, 1, 0], np.uint32))
    assert mark.contains(positions).tolist() == [True, True, True, False]
    assert mark.contains(positions.slice(2)).tolist() == [True, False]
    assert mark.unseen(positions).tolist() == [False, False, False, True]
    assert mark_from_json(mark.to_json()) == mark
    assert mark.low == mark.high == MongoOffset(6)


def test_marks_and_places_of_the_first_release_are_read() -> None:
    place = CdcOffset.from_json('{"MongoDb":{"moment":17,"ordinal":4,"seconds":1794848883,"token":"826AFB"}}')
    assert isinstance(place, MongoOffset)
    assert (place.time, place.token, place.events) == (TIME, "826AFB", {})
    place = CdcOffset.from_json('{"MongoDb":{"event":"826AFA","ordinal":4,"seconds":1794848883,"token":"826AFB"}}')
    assert isinstance(place, MongoOffset)
    assert (place.events, place.newest) == ({UNKNOWN: "826AFA"}, UNKNOWN)
    assert mark_from_json('{"MongoDb":{"at":{"ordinal":4,"seconds":1794848883}}}') == MongoMark(MongoOffset(TIME))


def test_a_mark_of_a_cluster_ends_later_than_what_it_shows() -> None:
    mark = MongoMark(MongoOffset(6), MongoOffset(9))
    assert (mark.low, mark.high) == (MongoOffset(6), MongoOffset(9))
    assert mark_from_json(mark.to_json()) == mark
    with pytest.raises(InvalidOffset):
        mark_from_json('{"MongoDb":{"at":{"ordinal":4,"seconds":1},"until":5}}')


def test_since_when_a_change_is_seen_is_kept_exactly_or_not_at_all() -> None:
    at = 5000 << 32 | 7
    cases = {
        at: at,
        at - 1: at - 1,
        4999 << 32 | (1 << 20) - 1: 4999 << 32 | (1 << 20) - 1,
        4999 << 32 | 1 << 20: at,  # a greater counter than there is room for
        906 << 32 | 1: 906 << 32 | 1,
        905 << 32 | 1: at,  # too long ago
        at + 1: at,
    }
    time, seen = np.full(len(cases), at, np.uint64), np.array(list(cases), np.uint64)
    made = positions_of(time, np.zeros(len(cases), np.uint32), seen_codes(time, seen))
    rows = np.frombuffer(made.buffers()[1], POSITION_DTYPE)
    assert seen_times(rows).tolist() == list(cases.values())
    assert all(position < MongoOffset(at).position_after(position) for position in made.to_pylist())


def test_the_token_of_a_part_is_one_of_its_event() -> None:
    whole, part, other = "826AFB0104", "826AFB01290204", "826AFB0204"
    assert is_same_event(whole, whole)
    assert is_same_event(whole, part)
    assert is_same_event(f"{part}:40", whole)
    assert not is_same_event(whole, other)
    assert not is_same_event(part, other)


def test_the_newest_event_is_that_of_the_latest_time() -> None:
    events = {"shop": f"82{TIME:016X}04", "stock": f"82{TIME + 1:016X}04", "audit": f"82{TIME - 1:016X}04"}
    assert MongoOffset(TIME + 1, events=events).newest == "stock"
    assert MongoOffset(TIME).newest == UNKNOWN
