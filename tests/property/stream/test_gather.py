"""Gathered rows are those that Arrow takes, and wrong places are refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.stream.gather import compiled_gather, take_columns

TEXTS = st.lists(st.none() | st.text(max_size=5) | st.text("ab", min_size=10, max_size=90), min_size=1, max_size=60)


@given(TEXTS, st.data())
def test_columns_are_taken_as_arrow_takes_them(texts: list[str | None], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(texts) - 1))
    length = data.draw(st.integers(1, len(texts) - start))
    order = np.array(data.draw(st.lists(st.integers(0, length - 1), max_size=100)), np.int64)
    raw = [None if text is None else text.encode() for text in texts]
    whole = pa.record_batch(
        {
            "text": pa.array(texts, pa.string()),
            "bytes": pa.array(raw, pa.binary()),
            "large": pa.array(texts, pa.large_string()),
            "view": pa.array(texts, pa.string_view()),
            "number": pa.array(range(len(texts))),
            "list": pa.array([[text] for text in texts], pa.list_(pa.string())),
            "never": pa.nulls(len(texts), pa.string()),
        }
    )
    rows = whole.slice(start, length)
    taken = take_columns(rows, order)
    for column, found in zip(rows.columns, taken, strict=True):
        found.validate(full=True)
        assert found.type == column.type
        assert found.to_pylist() == [column[place].as_py() for place in order]


@pytest.mark.skipif(compiled_gather() is None, reason="the compiled code was not built")
@pytest.mark.parametrize(
    ("offsets", "data", "validity", "start", "rows", "order", "error"),
    [
        ([0, 1], b"a", None, 0, 1, [1], IndexError),
        ([0, 1], b"a", None, 0, 1, [-1], IndexError),
        ([0, 1], b"a", None, 0, 2, [0], ValueError),
        ([0, 1], b"a", None, 1, 1, [0], ValueError),
        ([0, 2], b"a", None, 0, 1, [0], ValueError),
        ([1, 0], b"a", None, 0, 1, [0], ValueError),
        ([-1, 0], b"a", None, 0, 1, [0], ValueError),
        ([0] * 10, b"", b"\xff", 0, 9, [0], ValueError),
    ],
)
def test_the_compiled_code_refuses_what_its_buffers_do_not_hold(
    offsets: list[int],
    data: bytes,
    validity: bytes | None,
    start: int,
    rows: int,
    order: list[int],
    error: type[Exception],
) -> None:
    gather = compiled_gather()
    assert gather is not None
    with pytest.raises(error):
        gather(np.array(offsets, np.int32), data, validity, start, rows, np.array(order, np.int64))
