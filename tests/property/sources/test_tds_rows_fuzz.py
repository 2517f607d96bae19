"""Bytes that are no rows of TDS: refused or cut short, never read past their end."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers.sqlserver_double import wire

from headwater.sources.sqlserver import answer

pytestmark = pytest.mark.skipif(answer._DECODE is None, reason="the compiled code is not there")

_KINDS = ("int", "text", "long text", "long bytes", "float")
_CODES = bytes((2, 0, 6, 0, 9, 0, 8, 0, 4, 0))
_ROW = st.tuples(
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.text(max_size=20),
    st.none() | st.text(max_size=40),
    st.none() | st.binary(max_size=40),
    st.none() | st.floats(allow_nan=False),
)


def decoded(data: bytes, codes: bytes = _CODES) -> list[pa.Array]:
    rows, taken, _, columns = answer._DECODE(data, codes, 64)
    assert 0 <= taken <= len(data)
    arrays = [answer._array(codes[2 * place], rows, *buffers) for place, buffers in enumerate(columns)]
    for array in arrays:
        array.validate(full=True)
    return arrays


@given(st.lists(_ROW, max_size=20))
def test_rows_come_back_as_they_were_written(rows: list[tuple[object, ...]]) -> None:
    found = decoded(wire.rows_of(_KINDS, rows))
    assert [tuple(row) for row in zip(*(array.to_pylist() for array in found), strict=True)] == rows


@given(st.lists(_ROW, min_size=1, max_size=5), st.data())
def test_changed_bytes_are_rows_or_refused(rows: list[tuple[object, ...]], data: st.DataObject) -> None:
    made = bytearray(wire.rows_of(_KINDS, rows))
    for _ in range(data.draw(st.integers(1, 4))):
        made[data.draw(st.integers(0, len(made) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded(bytes(made[: data.draw(st.integers(0, len(made)))]))
    except ValueError:
        pass


@given(st.binary(max_size=200), st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_any_bytes_are_rows_or_refused(data: bytes, kinds: list[int]) -> None:
    codes = bytes(byte for kind in kinds for byte in (kind, 8 if kind in (1, 3) else 0))
    try:
        decoded(b"\xd1" + data, codes)
    except ValueError:
        pass
