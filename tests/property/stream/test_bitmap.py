"""Vnode bitmaps against Python's sets."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.stream import VnodeBitmap

QUICK = settings(max_examples=100, deadline=None)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, set[int], set[int]]:
    count = draw(st.integers(1, 70) | st.sampled_from([256, 32768]))
    vnodes = st.sets(st.integers(0, count - 1), max_size=40)
    return count, draw(vnodes), draw(vnodes)


@QUICK
@given(pairs())
def test_the_algebra_is_that_of_sets(drawn: tuple[int, set[int], set[int]]) -> None:
    count, left, right = drawn
    a, b = VnodeBitmap.of(left, count), VnodeBitmap.of(right, count)
    assert list(a) == sorted(left)
    assert len(a) == len(left)
    assert bool(a) == bool(left)
    assert set(a | b) == left | right
    assert set(a & b) == left & right
    assert set(a - b) == left - right
    assert set(a ^ b) == left ^ right
    assert set(~a) == set(range(count)) - left
    assert a.isdisjoint(b) == left.isdisjoint(right)
    assert (a <= b) == (left <= right)
    assert (a == b) == (left == right)
    assert a.is_full == (len(left) == count)


@QUICK
@given(pairs())
def test_every_form_reads_back(drawn: tuple[int, set[int], set[int]]) -> None:
    count, vnodes, _ = drawn
    bitmap = VnodeBitmap.of(vnodes, count)
    assert VnodeBitmap.from_ranges(bitmap.ranges(), count) == bitmap
    assert VnodeBitmap.from_hex(bitmap.to_hex(), count) == bitmap
    assert VnodeBitmap.from_json(json.loads(json.dumps(bitmap.to_json()))) == bitmap
    assert VnodeBitmap.from_mask(bitmap.mask()) == bitmap
    edges = [edge for part in bitmap.ranges() for edge in (part.start, part.stop)]
    assert edges == sorted(set(edges))


@QUICK
@given(pairs(), st.integers(1, 40))
def test_a_split_is_disjoint_contiguous_and_whole(drawn: tuple[int, set[int], set[int]], parts: int) -> None:
    count, vnodes, _ = drawn
    pieces = VnodeBitmap.of(vnodes, count).split(parts)
    assert len(pieces) == parts
    assert [vnode for piece in pieces for vnode in piece] == sorted(vnodes)
    sizes = [len(piece) for piece in pieces]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@QUICK
@given(pairs(), st.data())
def test_the_mask_of_an_array_is_membership(drawn: tuple[int, set[int], set[int]], data: st.DataObject) -> None:
    count, vnodes, _ = drawn
    rows = data.draw(st.lists(st.integers(0, count - 1), max_size=30))
    bitmap = VnodeBitmap.of(vnodes, count)
    expected = [vnode in vnodes for vnode in rows]
    assert bitmap.mask_of(pa.array(rows, pa.uint16())).tolist() == expected
    assert bitmap.mask_of(np.array(rows, dtype=np.uint16)).tolist() == expected
    assert [vnode in bitmap for vnode in rows] == expected
