"""Rows of the protocol into columns: by compiled code, wherever the bytes are cut, and by the library alike."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from tests.servers.sqlserver_double import wire

from headwater.sources.sqlserver import answer

pytestmark = pytest.mark.skipif(answer._DECODE is None, reason="the compiled code is not there")

KINDS = ("int", "bit", "float", "text", "bytes", "long text", "long bytes")
CODES = bytes((2, 0, 2, 0, 4, 0, 6, 0, 5, 0, 9, 0, 8, 0))
ROWS: list[list[Any]] = [
    [1, True, 0.5, "a", b"\x00", "日本 🐟" * 50, b"x" * 300],
    [None, None, None, None, None, None, None],
    [-(2**63), False, -1e300, "", b"", "", b""],
    [2**63 - 1, None, 2.0, "é", None, None, b"\xff"],
]
EXPECTED = [
    [None if value is None else int(value) if value is True or value is False else value for value in row]
    for row in ROWS
]


def decoded(data: bytes, most: int = 100) -> tuple[list[list[Any]], int, int]:
    rows, taken, stopped, columns = answer._DECODE(data, CODES, most)
    arrays = [answer._array(CODES[2 * place], rows, *buffers) for place, buffers in enumerate(columns)]
    for array in arrays:
        array.validate(full=True)
    return [list(row) for row in zip(*(array.to_pylist() for array in arrays), strict=True)], taken, stopped


def test_rows_are_decoded_with_nulls_and_every_character() -> None:
    data = wire.rows_of(KINDS, ROWS)
    assert decoded(data + wire.done(4)) == (EXPECTED, len(data), 0xFD)
    assert decoded(data, most=2) == (EXPECTED[:2], len(wire.rows_of(KINDS, ROWS[:2])), 0)


def test_rows_that_are_cut_anywhere_are_read_as_far_as_they_are_whole() -> None:
    data = wire.rows_of(KINDS, ROWS)
    for cut in range(len(data)):
        first, taken, stopped = decoded(data[:cut])
        assert stopped == 0
        rest, _, _ = decoded(data[taken:])
        assert first + rest == EXPECTED


def test_numbers_of_every_width_and_texts_in_chunks_are_read() -> None:
    chunks = "aé🐟".encode("utf-16le")
    long = struct.pack("<q", -2) + b"".join(struct.pack("<I", 1) + bytes([byte]) for byte in chunks) + bytes(4)
    row = b"\xd1\xff" + struct.pack("<hiqf", -2, -3, -4, 0.5) + long + struct.pack("<H", 3) + b"abc"
    rows, taken, _, columns = answer._DECODE(row, bytes((1, 1, 1, 2, 1, 4, 1, 8, 3, 4, 9, 0, 7, 0)), 5)
    assert (rows, taken) == (1, len(row))
    codes = (1, 1, 1, 1, 3, 9, 7)
    found = [answer._array(code, 1, *buffers)[0].as_py() for code, buffers in zip(codes, columns, strict=True)]
    assert found == [255, -2, -3, -4, 0.5, "aé🐟", "abc"]


@pytest.mark.parametrize("text", [b"\x3d\xd8", b"\x00\xdc", b"\x3d\xd8a\x00", b"a"])
def test_texts_that_are_no_unicode_are_refused(text: bytes) -> None:
    row = b"\xd1" + struct.pack("<H", 0) + struct.pack("<H", len(text)) + text
    with pytest.raises(ValueError, match="no Unicode") as refused:
        answer._DECODE(row, bytes((6, 1, 6, 0)), 5)
    assert refused.value.args[1] == 1  # the number of the column


@pytest.mark.parametrize("text", [b"\x3d\xd8", b"a\x00\x00\xdc", b"a"])
def test_texts_that_are_no_unicode_are_null_where_that_is_wanted(text: bytes) -> None:
    whole = "é".encode("utf-16le")
    chunks = struct.pack("<q", -2) + struct.pack("<I", len(text)) + text + bytes(4)
    first = b"\xd1" + struct.pack("<H", len(text)) + text + chunks
    last = b"\xd1" + struct.pack("<H", 2) + whole + struct.pack("<q", -2) + struct.pack("<I", 2) + whole + bytes(4)
    rows, taken, _, columns = answer._DECODE(first + last, bytes((6, 1, 9, 1)), 5)
    assert (rows, taken) == (2, len(first + last))
    assert [answer._array(6, 2, *buffers).to_pylist() for buffers in columns] == [[None, "é"], [None, "é"]]


def test_orders_are_passed_over_and_nothing_is_no_row() -> None:
    order = b"\xa9\x02\x00\x01\x00"
    assert decoded(order + wire.rows_of(KINDS, ROWS[:1]))[0] == EXPECTED[:1]
    assert decoded(order[:3]) == ([], 0, 0)
    assert decoded(b"") == ([], 0, 0)
