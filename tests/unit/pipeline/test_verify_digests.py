"""Digests of verify: equal rows are equal whatever holds them, and every difference is one."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.pipeline.verify.digests import DigestFiles, Digests, by_key, differing, digests_of

KEYS = ("id",)


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def row(value: Any, kind: pa.DataType) -> int:
    made = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([value], kind)], names=["id", "value"])
    return int(digests_of(made, KEYS)["row"][0])


@pytest.mark.parametrize(
    ("value", "kind", "other"),
    [
        ("text", pa.string(), pa.large_string()),
        (b"bytes", pa.binary(), pa.large_binary()),
        (7, pa.int16(), pa.int64()),
        (1.5, pa.float32(), pa.float64()),
        (Decimal("12.50"), pa.decimal128(12, 2), pa.decimal256(40, 2)),
        (1_700_000_000_000_000, pa.timestamp("us", "UTC"), pa.timestamp("us", "Etc/UTC")),
        ([1, None, 3], pa.list_(pa.int32()), pa.large_list(pa.int64())),
        ([["a"], [], None], pa.list_(pa.list_(pa.string())), pa.list_(pa.list_(pa.large_string()))),
    ],
)
def test_a_value_has_one_digest_in_every_representation(value: Any, kind: pa.DataType, other: pa.DataType) -> None:
    assert row(value, kind) == row(value, other)


def test_values_that_differ_have_digests_that_differ() -> None:
    lists = [None, [], [None], [0], [1, 2], [2, 1], [1, 2, 2], [12]]
    texts = [None, "", "a", "a ", "A", "ab"]
    structs = [None, {"a": 1, "b": None}, {"a": None, "b": 1}, {"a": 1, "b": 1}]
    for values, kind in (
        (lists, pa.list_(pa.int64())),
        (texts, pa.string()),
        (structs, pa.struct([("a", pa.int32()), ("b", pa.int32())])),
    ):
        assert len({row(value, kind) for value in values}) == len(values)


def test_a_slice_of_lists_has_the_digests_of_its_own_rows() -> None:
    whole = batch(id=[1, 2, 3, 4], tags=[["x"], ["y", "z"], None, []])
    parts = np.concatenate([digests_of(whole.slice(0, 1), KEYS), digests_of(whole.slice(1, 3), KEYS)])
    assert (parts == digests_of(whole, KEYS)).all()


def test_a_value_that_moves_to_the_next_column_is_a_difference() -> None:
    one, other = batch(id=[1], a=["x"], b=[""]), batch(id=[1], a=[""], b=["x"])
    assert digests_of(one, KEYS)["row"][0] != digests_of(other, KEYS)["row"][0]


def test_every_kind_of_difference_is_found_and_nothing_else() -> None:
    here = by_key(digests_of(batch(id=[1, 2, 3, 4, 5], v=["a", "b", "c", "d", "e"]), KEYS, 7))
    there = by_key(digests_of(batch(id=[5, 2, 4, 1, 4, 6], v=["e", "b!", "d", "a", "d", "f"]), KEYS))
    found = differing(here, there)
    counts = sorted(zip(found["rows"].tolist(), found["rows_there"].tolist(), strict=True))
    assert counts == [(0, 1), (1, 0), (1, 1), (1, 2)]  # extra, missing, changed, doubled
    assert set(found["split"][found["rows"] > 0].tolist()) == {7}


def test_rows_that_the_source_has_twice_must_be_there_twice() -> None:
    rows = batch(id=[1, 1, 2], v=["a", "b", "c"])
    assert not len(differing(by_key(digests_of(rows, KEYS)), by_key(digests_of(rows.take([2, 1, 0]), KEYS))))
    assert len(differing(by_key(digests_of(rows, KEYS)), by_key(digests_of(rows.slice(1), KEYS)))) == 1


@pytest.mark.parametrize("parts", [1, 7])
def test_files_hold_every_key_once_and_in_order(tmp_path: Path, parts: int) -> None:
    rows = batch(id=list(range(5000)), v=[str(number) for number in range(5000)])
    expected: Digests = by_key(digests_of(rows, KEYS))
    files = DigestFiles(tmp_path / "here", parts)
    for start in range(0, 5000, 700):
        files.add(digests_of(rows.slice(start, 700), KEYS))
    files.close()
    assert files.rows == 5000
    assert (np.concatenate([files.part(part) for part in range(parts)]) == expected).all()


def test_nothing_differs_from_nothing() -> None:
    empty = by_key(digests_of(batch(id=[1], v=["a"]).slice(1), KEYS))
    assert not len(differing(empty, empty))
    full = by_key(digests_of(batch(id=[1], v=["a"]), KEYS))
    assert len(differing(full, empty)) == len(differing(empty, full)) == 1
