"""Compaction by key: what the changes of a key come to."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.stream import Chunk, Op, compact, deletes_before_inserts, force_append_only
from headwater.stream.errors import ChunkError, KeyColumnError, KeyTypeError

I, D, UI, UD = Op.INSERT, Op.DELETE, Op.UPDATE_INSERT, Op.UPDATE_DELETE  # noqa: E741
Change = tuple[Op, int, str]


def chunk(*changes: Change) -> Chunk:
    batch = pa.record_batch(
        {
            "id": pa.array([row[1] for row in changes], pa.int64()),
            "v": pa.array([row[2] for row in changes], pa.string()),
        }
    )
    return Chunk.build(batch, [row[0] for row in changes], ("id",))


def changes(found: Chunk) -> list[Change]:
    columns = (found.ops, found.rows.column("id"), found.rows.column("v"))
    return [(Op(op), key, value) for op, key, value in zip(*(c.to_pylist() for c in columns), strict=True)]


@pytest.mark.parametrize(
    ("given", "net"),
    [
        ([(I, 1, "a")], [(I, 1, "a")]),
        ([(I, 1, "a"), (D, 1, "a")], []),
        ([(I, 1, "a"), (UD, 1, "a"), (UI, 1, "b")], [(I, 1, "b")]),
        ([(D, 1, "a"), (I, 1, "b")], [(UD, 1, "a"), (UI, 1, "b")]),
        ([(UD, 1, "a"), (UI, 1, "b"), (UD, 1, "b"), (UI, 1, "c")], [(UD, 1, "a"), (UI, 1, "c")]),
        ([(UD, 1, "a"), (UI, 1, "b"), (D, 1, "b")], [(D, 1, "a")]),
        ([(UD, 1, "a"), (UI, 1, "b"), (UD, 1, "b"), (UI, 1, "a")], []),
        ([(D, 1, "a"), (D, 1, "a")], [(D, 1, "a")]),
        ([(UI, 1, "a")], [(UI, 1, "a")]),
        ([(UI, 1, "a"), (UI, 1, "b")], [(UI, 1, "b")]),
        ([(UI, 1, "a"), (D, 1, "b")], [(D, 1, "b")]),
        ([(I, 1, "a"), (UI, 1, "b")], [(I, 1, "b")]),
        ([(I, 1, "a"), (UI, 1, "b"), (D, 1, "b")], []),
        ([(UD, 2, "a"), (UI, 2, "b"), (UI, 1, "c")], [(UD, 2, "a"), (UI, 2, "b"), (UI, 1, "c")]),
        ([(I, 1, "a"), (I, 2, "b"), (D, 3, "c"), (UD, 1, "a"), (UI, 1, "z")], [(I, 2, "b"), (D, 3, "c"), (I, 1, "z")]),
    ],
)
def test_44_the_net_change_of_a_key(given: list[Change], net: list[Change]) -> None:
    assert changes(compact(chunk(*given), ("id",))) == net
    assert changes(compact([chunk(*given), chunk()], ("id",))) == net, "chunks of one epoch are one"


def test_44_an_insert_and_a_delete_in_two_chunks_of_an_epoch_vanish() -> None:
    assert compact([chunk((I, 1, "a")), chunk((D, 1, "a"))], ("id",)).num_rows == 0


def test_44_what_changes_nothing_is_kept_if_asked_for() -> None:
    there_and_back = chunk((UD, 1, "a"), (UI, 1, "b"), (UD, 1, "b"), (UI, 1, "a"))
    assert changes(compact(there_and_back, ("id",), keep_unchanged=True)) == [(UD, 1, "a"), (UI, 1, "a")]
    came_and_went = chunk((I, 1, "a"), (UD, 1, "a"), (UI, 1, "b"), (D, 1, "b"))
    assert changes(compact(came_and_went, ("id",), keep_vanished=True)) == [(D, 1, "b")]


def test_deletes_come_first_and_pairs_stay_whole_if_asked_for() -> None:
    given = chunk((I, 1, "a"), (UD, 2, "b"), (UI, 2, "c"), (D, 3, "d"), (I, 4, "e"), (D, 5, "f"))
    assert changes(compact(given, ("id",), deletes_first=True)) == [
        (D, 3, "d"),
        (D, 5, "f"),
        (I, 1, "a"),
        (UD, 2, "b"),
        (UI, 2, "c"),
        (I, 4, "e"),
    ]


def test_by_another_key_an_update_of_it_is_a_delete_and_an_insert_and_two_rows_are_a_pair() -> None:
    swapped = chunk((UD, 1, "a"), (UI, 1, "b"), (UD, 2, "b"), (UI, 2, "a"))
    ordered = deletes_before_inserts(swapped)
    assert changes(ordered) == [(D, 1, "a"), (D, 2, "b"), (I, 1, "b"), (I, 2, "a")]
    assert changes(compact(ordered, ("v",))) == [(UD, 2, "b"), (UI, 1, "b"), (UD, 1, "a"), (UI, 2, "a")]
    assert changes(deletes_before_inserts(chunk((UI, 1, "a"), (D, 2, "b")))) == [(D, 2, "b"), (UI, 1, "a")]
    assert changes(compact(chunk((UD, 1, "a"), (UI, 1, "b")), ("v",))) == [(D, 1, "a"), (I, 1, "b")]


def test_38_append_only_by_force_keeps_what_adds_as_inserts() -> None:
    given = chunk((I, 1, "a"), (UD, 1, "a"), (UI, 1, "b"), (D, 1, "b"), (D, 2, "c"))
    assert changes(force_append_only(given)) == [(I, 1, "a"), (I, 1, "b")]
    inserts = chunk((I, 1, "a"))
    assert force_append_only(inserts) is inserts
    assert deletes_before_inserts(inserts) is inserts
    assert force_append_only(chunk((D, 1, "a"))).num_rows == 0


def test_keys_are_equal_by_value() -> None:
    keys = [
        pa.array([0.0, -0.0, float("nan"), float("nan"), None, None], pa.float64()),
        pa.array([1, 1, 2, 2, None, None], pa.float64()).cast(pa.float16()),
        pa.array([1, 1, 2, 2, None, None], pa.decimal128(5, 1)).cast(pa.decimal32(5, 1)),
        pa.array(["a", "a", "b", "b", None, None], pa.string_view()),
        pa.array(["a", "a", "b", "b", None, None]).dictionary_encode(),
        pa.array([b"a" * 16, b"a" * 16, b"b" * 16, b"b" * 16, None, None], pa.uuid()),
        pa.nulls(6),
    ]
    for key in keys:
        batch = pa.RecordBatch.from_arrays([key, pa.array(range(6))], names=["k", "v"])
        found = compact(Chunk.inserts(batch, ("v",)), ("k",))
        assert found.rows.column("v").to_pylist() == ([5] if key.type == pa.null() else [1, 3, 5]), key.type
    two = pa.record_batch({"a": [1, 1, 2, 2, 1], "b": ["x", "y", "x", "y", "x"]})
    assert compact(Chunk.inserts(two, ("a",)), ("a", "b")).rows.to_pylist() == two.slice(1).to_pylist()


def test_a_value_of_any_type_can_change() -> None:
    def pair(old: object, new: object, kind: pa.DataType) -> Chunk:
        batch = pa.RecordBatch.from_arrays([pa.array([7, 7]), pa.array([old, new], kind)], names=["id", "v"])
        return Chunk.build(batch, [UD, UI], ("id",))

    same: list[tuple[object, object, pa.DataType]] = [
        (None, None, pa.string()),
        (float("nan"), float("nan"), pa.float64()),
        ("a", "a", pa.string_view()),
    ]
    for old, new, kind in same:
        assert compact(pair(old, new, kind), ("id",)).num_rows == 0, kind
    changed: list[tuple[object, object, pa.DataType]] = [
        (None, 1, pa.int64()),
        (0.0, -0.0, pa.float64()),
        ([1], [1], pa.list_(pa.int64())),
    ]
    for old, new, kind in changed:
        assert compact(pair(old, new, kind), ("id",)).num_rows == 2, kind


def test_a_key_that_cannot_be_compacted_by_is_refused() -> None:
    with pytest.raises(KeyColumnError):
        compact(chunk((I, 1, "a")), ())
    with pytest.raises(KeyColumnError):
        compact(chunk((I, 1, "a")), ("nothing",))
    nested = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([[1]])], names=["id", "v"])
    with pytest.raises(KeyTypeError):
        compact(Chunk.inserts(nested, ("id",)), ("v",))
    with pytest.raises(ChunkError):
        compact([], ("id",))
    assert compact(Chunk.empty(pa.schema([("id", pa.int64()), ("x", pa.string())])), ("id", "x")).num_rows == 0
