"""Vnode bitmaps: sets, ranges, texts and their refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.errors import InputError
from headwater.stream import BitmapError, FormatError, VnodeBitmap, VnodeCountError, VnodeRangeError


def test_full_and_empty() -> None:
    assert len(VnodeBitmap.full()) == 256
    assert VnodeBitmap.full(32768).is_full
    assert not VnodeBitmap.empty()
    assert VnodeBitmap.full(1).ranges() == (range(1),)
    assert ~VnodeBitmap.full(7) == VnodeBitmap.empty(7)


def test_ranges_are_half_open_and_merge() -> None:
    bitmap = VnodeBitmap.from_ranges([range(4), range(4, 6), range(9, 10), range(9, 9)], 16)
    assert bitmap.ranges() == (range(6), range(9, 10))
    assert list(bitmap) == [0, 1, 2, 3, 4, 5, 9]
    assert repr(bitmap) == "VnodeBitmap(0–5, 9 of 16)"
    assert repr(VnodeBitmap.empty(4)) == "VnodeBitmap(empty of 4)"


def test_membership() -> None:
    bitmap = VnodeBitmap.of([1, 3], 4)
    assert 1 in bitmap
    assert np.uint16(3) in bitmap
    assert 0 not in bitmap
    assert -1 not in bitmap
    assert 400 not in bitmap
    assert "1" not in bitmap
    assert bitmap.mask_of(pa.array([3, 0, 1, 1], pa.uint16())).tolist() == [True, False, True, True]
    assert bitmap.mask_of(pa.array([], pa.uint16())).tolist() == []


def test_split_gives_contiguous_parts_of_equal_size() -> None:
    parts = VnodeBitmap.full(10).split(4)
    assert [part.ranges() for part in parts] == [(range(3),), (range(3, 6),), (range(6, 8),), (range(8, 10),)]
    assert [len(part) for part in VnodeBitmap.of([2, 5], 8).split(3)] == [1, 1, 0]
    with pytest.raises(BitmapError):
        VnodeBitmap.full().split(0)


@pytest.mark.parametrize("count", [0, 32769, True, "8"])
def test_bad_counts_are_refused(count: Any) -> None:
    with pytest.raises(VnodeCountError):
        VnodeBitmap.full(count)


def test_vnodes_out_of_range_are_refused() -> None:
    for bad in ([8], [-1], [0, 9]):
        with pytest.raises(VnodeRangeError):
            VnodeBitmap.of(bad, 8)
    with pytest.raises(VnodeRangeError) as caught:
        VnodeBitmap(8, 1 << 12)
    assert (caught.value.vnode, caught.value.count) == (12, 8)
    with pytest.raises(VnodeRangeError):
        VnodeBitmap.from_ranges([range(5, 9)], 8)
    with pytest.raises(VnodeRangeError):
        VnodeBitmap.full(8).mask_of(pa.array([8], pa.uint16()))
    with pytest.raises(BitmapError, match="nulls"):
        VnodeBitmap.full(8).mask_of(pa.array([None], pa.uint16()))
    with pytest.raises(BitmapError, match="step"):
        VnodeBitmap.from_ranges([range(0, 8, 2)], 8)
    with pytest.raises(BitmapError):
        VnodeBitmap(8, -1)


def test_bitmaps_of_different_counts_do_not_combine() -> None:
    with pytest.raises(BitmapError, match="of 8 and of 16"):
        VnodeBitmap.full(8) | VnodeBitmap.full(16)
    with pytest.raises(InputError):
        VnodeBitmap.full(8).isdisjoint(VnodeBitmap.full(16))


def test_hex_has_vnode_0_as_the_lowest_bit_of_the_first_byte() -> None:
    bitmap = VnodeBitmap.of([0, 9], 12)
    assert bitmap.to_hex() == "0102"
    assert VnodeBitmap.from_hex("0102", 12) == bitmap
    for bad in ("01", "010200", "zz02", "01 2", "", "0110"):
        with pytest.raises(InputError):
            VnodeBitmap.from_hex(bad, 12)


def test_json_is_ranges_while_they_are_few_and_hex_after() -> None:
    contiguous = VnodeBitmap.from_ranges([range(128)])
    assert contiguous.to_json() == {"count": 256, "ranges": [[0, 128]]}
    scattered = VnodeBitmap.of(range(0, 32768, 2), 32768)
    assert len(json.dumps(scattered.to_json())) < 9000
    for bitmap in (contiguous, scattered, VnodeBitmap.empty(3)):
        assert VnodeBitmap.from_json(json.loads(json.dumps(bitmap.to_json()))) == bitmap


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"count": 8},
        {"count": 8, "hex": 3},
        {"count": 8, "ranges": 3},
        {"count": 8, "ranges": [[0]]},
        {"count": 8, "ranges": [["a", "b"]]},
    ],
)
def test_other_json_is_refused(value: Any) -> None:
    with pytest.raises(FormatError):
        VnodeBitmap.from_json(value)


def test_json_with_bad_vnodes_or_counts_is_refused() -> None:
    with pytest.raises(VnodeRangeError):
        VnodeBitmap.from_json({"count": 8, "ranges": [[0, 9]]})
    with pytest.raises(BitmapError):
        VnodeBitmap.from_json({"count": 8, "hex": "0000"})
    with pytest.raises(VnodeCountError):
        VnodeBitmap.from_json({"count": 0, "ranges": []})


def test_bitmaps_are_values() -> None:
    assert {VnodeBitmap.of([1]), VnodeBitmap.of([1, 1])} == {VnodeBitmap.from_ranges([range(1, 2)])}
    assert VnodeBitmap.of([1], 8) != VnodeBitmap.of([1], 9)
