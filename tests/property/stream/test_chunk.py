"""Chunks against lists of rows: nothing is lost, nothing changes its place, and pairs never part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.stream import Chunk, ChunkError, Op

settings.register_profile("stream", max_examples=80, deadline=None)
QUICK = settings.get_profile("stream")

Row = tuple[int, str, int, int]
"""id, text, op, vnode"""


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    """A chunk of single rows and update pairs, with a small vnode count so that vnodes repeat."""
    ids: list[int] = []
    texts: list[str | None] = []
    ops: list[int] = []
    for _ in range(draw(st.integers(0, 12))):
        key = draw(st.integers(0, 20))
        step = draw(st.sampled_from([[Op.INSERT], [Op.DELETE], [Op.UPDATE_DELETE, Op.UPDATE_INSERT]]))
        for op in step:
            ids.append(key)
            texts.append(draw(st.none() | st.text("ab", max_size=30)))
            ops.append(op)
    rows = pa.record_batch({"id": pa.array(ids, pa.int64()), "text": pa.array(texts, pa.string())})
    chunk = Chunk.build(rows, pa.array(ops, pa.int8()), ["id"], 8)
    skipped = draw(st.integers(0, 2))
    codes = chunk.ops.to_pylist()
    if skipped <= len(codes) and codes[skipped : skipped + 1] != [Op.UPDATE_INSERT]:
        chunk = chunk.slice(skipped)
    return chunk


def listed(chunk: Chunk) -> list[Any]:
    columns = [*chunk.rows.to_pydict().values(), chunk.ops.to_pylist(), chunk.vnodes.to_pylist()]
    return list(zip(*columns, strict=True))


def is_well_formed(chunk: Chunk) -> bool:
    """The constructor checks it all."""
    return Chunk(chunk.rows, chunk.ops, chunk.vnodes) == chunk


@QUICK
@given(chunks(), st.none() | st.integers(1, 6), st.none() | st.integers(1, 200))
def test_the_pieces_of_a_split_are_the_chunk_and_none_parts_a_pair(
    chunk: Chunk, max_rows: int | None, max_bytes: int | None
) -> None:
    pieces = chunk.split(max_rows, max_bytes)
    assert all(is_well_formed(piece) for piece in pieces)
    assert [row for piece in pieces for row in listed(piece)] == listed(chunk)
    if max_rows is not None:
        for piece in pieces:
            over = piece.num_rows - max_rows
            assert over <= 1
            assert over <= 0 or piece.ops[-1].as_py() == Op.UPDATE_INSERT
    assert all(piece.num_rows for piece in pieces) or chunk.num_rows == 0


@QUICK
@given(st.lists(st.sampled_from(list(Op)), max_size=10))
def test_ops_are_accepted_exactly_if_every_old_row_has_its_new_one(ops: list[Op]) -> None:
    text = "".join(str(int(op)) for op in ops)
    whole = "4" not in text.replace("43", "")
    rows = pa.record_batch({"id": pa.array([0] * len(ops), pa.int64())})
    if whole:
        assert Chunk.build(rows, ops, ["id"]).ops.to_pylist() == ops
        return
    with pytest.raises(ChunkError) as caught:
        Chunk.build(rows, ops, ["id"])
    row = caught.value.row
    assert row is not None
    assert ops[row] is Op.UPDATE_DELETE
    # Everything before the named row is in order.
    assert "4" not in text[:row].replace("43", "")


@QUICK
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=10))
def test_exactly_the_updates_that_change_the_key_become_delete_and_insert(pairs: list[tuple[int, int]]) -> None:
    rows = pa.record_batch({"id": pa.array(np.array(pairs, dtype=np.int64).reshape(-1))})
    chunk = Chunk.build(rows, [Op.UPDATE_DELETE, Op.UPDATE_INSERT] * len(pairs), ["id"], 2)
    expected = [
        op
        for old, new in pairs
        for op in ((Op.UPDATE_DELETE, Op.UPDATE_INSERT) if old == new else (Op.DELETE, Op.INSERT))
    ]
    assert chunk.ops.to_pylist() == expected
