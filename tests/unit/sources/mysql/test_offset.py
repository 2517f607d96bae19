"""Positions of MySQL and MariaDB: by transactions, by file, and which have an order."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from headwater.sources.errors import ForeignOffset, InvalidOffset, SourceWentBack
from headwater.sources.mysql.gtid import MariaDbGtids, MySqlGtids
from headwater.sources.mysql.offset import MySqlOffset, place_in_file, positions_of
from headwater.sources.offset import CdcOffset

A, B = UUID(int=10), UUID(int=11)


def at(filename: str, position: int, server: str = "s") -> MySqlOffset:
    return MySqlOffset(filename, position, None, server)


def of(text: str, server: str = "s") -> MySqlOffset:
    gtids = MySqlGtids.parse(text) if ":" in text else MariaDbGtids.parse(text)
    return MySqlOffset("binlog.000001", 4, gtids, server)


def read(fields: dict[str, Any]) -> MySqlOffset:
    made = CdcOffset.from_json(json.dumps({"MySql": fields}))
    assert isinstance(made, MySqlOffset)
    return made


def test_files_are_ordered_by_their_number_and_not_by_their_text() -> None:
    assert at("binlog.999999", 1 << 30) < at("binlog.1000000", 4)
    assert at("binlog.000009", 5000) < at("binlog.000010", 4)
    assert at("binlog.000009", 157) < at("binlog.000009", 300)


def test_positions_beyond_four_gigabytes_keep_their_order() -> None:
    assert at("binlog.000001", (1 << 32) - 100) < at("binlog.000001", (1 << 32) + 100) < at("binlog.000002", 4)


def test_files_of_two_servers_or_of_two_names_have_no_order() -> None:
    for other in (at("binlog.000001", 4, "other"), at("mysql-bin.000001", 4), of(f"{A}:1-5")):
        with pytest.raises(ForeignOffset):
            _ = at("binlog.000001", 4) < other
        assert at("binlog.000001", 4) != other


def test_transactions_count_the_same_on_every_server() -> None:
    assert of(f"{A}:1-5", "one") < of(f"{A}:1-5,{B}:1", "two") < of(f"{A}:1-6,{B}:1", "one")
    assert of(f"{A}:1-5,{B}:1", "one") == of(f"{B}:1,{A}:1-3:4-5", "two")


def test_sets_that_do_not_contain_each_other_have_no_order() -> None:
    with pytest.raises(ForeignOffset):
        _ = of(f"{A}:1-5") < of(f"{A}:1-4,{B}:1")
    with pytest.raises(ForeignOffset):
        _ = of("0-1-5,1-2-3") < of("0-1-4,1-2-4")


def test_a_place_has_passed_another_only_with_all_of_its_transactions() -> None:
    one, two = UUID(int=1), UUID(int=2)
    on_their_way = MySqlOffset("", 0, MySqlGtids.parse(f"{one}:1-5,{two}:1"))
    assert not MySqlOffset("", 0, MySqlGtids.parse(f"{one}:1-9")).has_passed(on_their_way)
    assert MySqlOffset("", 0, MySqlGtids.parse(f"{one}:1-9,{two}:1")).has_passed(on_their_way)
    assert on_their_way.has_passed(on_their_way)


def test_domains_of_mariadb_are_followed_side_by_side() -> None:
    assert of("0-1-100") < of("0-2-101") < of("0-2-101,7-1-1") < of("0-2-102,7-1-1")


def test_a_number_that_goes_back_in_its_domain_is_refused() -> None:
    with pytest.raises(SourceWentBack, match="0-2-100"):
        MariaDbGtids.parse("0-1-100").with_transaction(0, 2, 100)


@pytest.mark.parametrize(
    "text", ["", f"{A}:1-5", f"{A}:1-5:7:9-11", f"{A}:1-5,{B}:3", f"{A}:1-5:blue:1-3", f"{A}:red:7"]
)
def test_a_set_reads_what_it_writes(text: str) -> None:
    assert str(MySqlGtids.parse(text)) == text
    assert read(of(text).to_fields() if text else {"filename": "", "position": 0, "gtid_set": ""}).gtids is not None


def test_a_set_of_the_server_may_have_line_breaks_and_capitals() -> None:
    told = MySqlGtids.parse(f"{str(A).upper()}:1-3,\n{B}:1")
    assert told == MySqlGtids.parse(f"{A}:1-3,{B}:1")


@pytest.mark.parametrize("text", ["x", f"{A}:0", f"{A}:5-3", f"{A}:1-x", "0-1", "0-1-x"])
def test_other_texts_are_no_set(text: str) -> None:
    parse = MySqlGtids.parse if ":" in text or text == "x" else MariaDbGtids.parse
    with pytest.raises(InvalidOffset):
        parse(text)


def test_transactions_are_added_in_any_order() -> None:
    made = MySqlGtids()
    for number in (1, 2, 5, 4, 3, 7):
        made = made.with_transaction(A, "", number)
    assert str(made) == f"{A}:1-5:7"
    assert made.size == 6
    assert made.has(A, "", 7)
    assert not made.has(A, "", 6)


def test_a_set_is_encoded_as_the_protocol_has_it() -> None:
    plain = MySqlGtids.parse(f"{A}:1-5").encoded()
    assert plain == b"\1" + bytes(7) + A.bytes + b"\1" + bytes(7) + b"\1" + bytes(7) + b"\6" + bytes(7)
    tagged = MySqlGtids.parse(f"{A}:ab:1").encoded()
    assert tagged[:8] == b"\1\1\0\0\0\0\0\1"
    assert tagged[8:24] == A.bytes
    assert tagged[24:27] == b"\4ab"


def test_json_of_a_position_reads_back_and_the_plain_form_is_read_too() -> None:
    for made in (at("binlog.000007", 659), of(f"{A}:1-5"), of("0-1-5"), MySqlOffset("b.1", 9, None, "s", 3, 17)):
        assert CdcOffset.from_json(made.to_json()).to_json() == made.to_json()
    assert read({"filename": "binlog.000007", "position": 659687560}).place == place_in_file("binlog.000007", 659687560)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"filename": "binlog", "position": 4},
        {"filename": "binlog.1", "position": -1},
        {"filename": "binlog.1", "position": "4"},
        {"filename": 1, "position": 4},
        {"filename": "binlog.1", "position": 4, "gtid_set": 7},
        {"filename": "binlog.9999999999", "position": 4},
        {"filename": "binlog.1", "position": 4, "seq": 1 << 32},
    ],
)
def test_other_json_is_no_position(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidOffset):
        read(fields)


def test_rows_of_history_lie_between_the_commits() -> None:
    before, after = of("0-1-5"), of("0-1-6")
    rows = positions_of(np.array([before.place, after.place], np.uint64), np.array([7, 0], np.uint32)).to_pylist()
    history = after.position_after(rows[0])
    assert rows[0] < history < rows[1]
    assert rows[0] < after.position_after(None) < rows[1]
    assert of("").position_after(None) > bytes(16)


def test_a_transaction_that_a_boundary_has_is_below_it() -> None:
    """The rank that snapshots decide by."""
    before = of(f"{A}:1-5")
    after = of(f"{A}:1-6")
    row = MySqlOffset("", 0, before.gtids, "s", 4)
    assert before < row < after
    assert before.place <= row.place < after.place


def test_transactions_without_others_of_their_server() -> None:
    whole = MySqlGtids.parse(f"{A}:1-10:20-30,{B}:tag:5-9")
    assert str(whole.minus(MySqlGtids.parse(f"{A}:3-4:9-22:30"))) == f"{A}:1-2:5-8:23-29,{B}:tag:5-9"
    assert whole.minus(whole) == MySqlGtids()
    assert whole.minus(MySqlGtids.parse(f"{B}:5-9")) == whole
