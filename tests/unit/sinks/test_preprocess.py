"""Which rows a sink is given, by its mode and its key."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.sinks import EpochTooLarge, Folding, Preprocessor, SinkInput, SinkInputError, SinkMode
from headwater.stream import Chunk, Op

I, D, UI, UD = Op.INSERT, Op.DELETE, Op.UPDATE_INSERT, Op.UPDATE_DELETE  # noqa: E741
Change = tuple[Op, int, str, int]
SCHEMA = pa.schema([("id", pa.int64()), ("email", pa.string()), ("v", pa.int64())])


def chunk(*changes: Change) -> Chunk:
    arrays = [pa.array([row[place + 1] for row in changes], kind) for place, kind in enumerate(SCHEMA.types)]
    return Chunk.build(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), [row[0] for row in changes], ("id",))


def changes(found: Chunk | None) -> list[Change]:
    if found is None:
        return []
    columns = [column.to_pylist() for column in (found.ops, *found.rows.columns)]
    return [(Op(op), key, email, v) for op, key, email, v in zip(*columns, strict=True)]


def given(wanted: SinkInput, *chunks: Chunk) -> list[list[Change]]:
    """What comes for each chunk, and at the end of the epoch."""
    preprocessor = Preprocessor(wanted)
    return [*(changes(preprocessor.chunk(one)) for one in chunks), changes(preprocessor.end_epoch())]


LIFE = chunk((I, 1, "a", 1), (UD, 1, "a", 1), (UI, 1, "a", 2), (I, 2, "b", 1), (D, 3, "c", 1), (D, 1, "a", 2))


def test_38_append_only_by_force_drops_deletes_and_a_plain_one_refuses_them() -> None:
    found = given(SinkInput(SinkMode.FORCE_APPEND_ONLY), LIFE, chunk((D, 2, "b", 1)))
    assert found == [[(I, 1, "a", 1), (I, 1, "a", 2), (I, 2, "b", 1)], [], []]
    plain = Preprocessor(SinkInput(SinkMode.APPEND_ONLY))
    inserts = chunk((I, 1, "a", 1), (I, 1, "a", 1))
    assert plain.chunk(inserts) is inserts, "rows of an append-only sink do not replace each other"
    with pytest.raises(SinkInputError, match="append-only"):
        plain.chunk(LIFE)


SWAP = (
    chunk((UD, 1, "a", 1), (UI, 1, "b", 1)),  # takes the key before …
    chunk((UD, 2, "b", 2), (UI, 2, "a", 2)),  # … the other gives it up
)


def test_39_an_upsert_sink_with_another_key_is_given_the_epoch_in_an_order_that_works() -> None:
    found = given(SinkInput(SinkMode.UPSERT, ("id",), ("email",)), *SWAP)
    assert found == [[], [], [(UD, 2, "b", 2), (UI, 1, "b", 1), (UD, 1, "a", 1), (UI, 2, "a", 2)]]
    # An insert that came before the delete of the same key of the sink is no net delete.
    found = given(SinkInput(SinkMode.UPSERT, ("id",), ("email",)), chunk((I, 5, "x", 1)), chunk((D, 4, "x", 0)))
    assert found[-1] == [(UD, 4, "x", 0), (UI, 5, "x", 1)]


def test_40_a_retract_sink_with_another_key_is_given_old_rows_that_are_there() -> None:
    found = given(
        SinkInput(SinkMode.RETRACT, ("id",), ("email",)),
        chunk((UD, 1, "a", 1), (UI, 1, "c", 1), (D, 2, "b", 2)),
        chunk((UD, 1, "c", 1), (UI, 1, "b", 9), (I, 3, "a", 3), (I, 4, "d", 4), (D, 4, "d", 4)),
    )
    assert found == [[], [], [(UD, 2, "b", 2), (UI, 1, "b", 9), (UD, 1, "a", 1), (UI, 3, "a", 3)]]


def test_41_a_table_of_our_own_is_given_every_change_of_a_row() -> None:
    wanted = SinkInput(SinkMode.UPSERT, ("id",), ("email",), Folding.NONE)
    assert given(wanted, LIFE, *SWAP) == [changes(LIFE), *map(changes, SWAP), []]
    assert given(SinkInput(SinkMode.RETRACT, folding=Folding.NONE), LIFE) == [changes(LIFE), []]


@pytest.mark.parametrize("mode", [SinkMode.UPSERT, SinkMode.RETRACT])
@pytest.mark.parametrize("sink_key", [("id",), ("email", "id")])
def test_42_by_default_each_chunk_is_folded_by_the_key_of_the_sink(mode: SinkMode, sink_key: tuple[str, ...]) -> None:
    later = chunk((UD, 2, "b", 1), (UI, 2, "b", 5), (UD, 2, "b", 5), (UI, 2, "b", 7))
    found = given(SinkInput(mode, ("id",), sink_key), LIFE, later)
    assert found == [[(I, 2, "b", 1), (D, 3, "c", 1)], [(UD, 2, "b", 1), (UI, 2, "b", 7)], []]


def test_42_an_update_of_a_part_of_the_sinks_key_is_a_delete_and_an_insert() -> None:
    found = given(SinkInput(SinkMode.UPSERT, ("id",), ("id", "email")), chunk((UD, 1, "a", 1), (UI, 1, "b", 1)))
    assert found == [[(D, 1, "a", 1), (I, 1, "b", 1)], []]


def test_44_by_force_a_whole_epoch_is_folded() -> None:
    wanted = SinkInput(SinkMode.UPSERT, ("id",), ("id",), Folding.EPOCH)
    found = given(wanted, LIFE, chunk((UD, 2, "b", 1), (UI, 2, "b", 5)), chunk((I, 3, "c", 2)))
    assert found == [[], [], [], [(I, 2, "b", 5), (UD, 3, "c", 1), (UI, 3, "c", 2)]]
    preprocessor = Preprocessor(wanted)
    preprocessor.chunk(LIFE)
    preprocessor.reset()
    assert preprocessor.end_epoch() is None, "a rewound epoch comes again"


def test_changes_that_may_come_twice_leave_their_last_word() -> None:
    back = chunk((UD, 1, "a", 1), (UI, 1, "b", 1), (UD, 1, "b", 1), (UI, 1, "a", 1), (I, 2, "x", 1), (D, 2, "x", 1))
    assert given(SinkInput(SinkMode.UPSERT, ("id",), ("id",)), back) == [[], []]
    found = given(SinkInput(SinkMode.UPSERT, ("id",), ("id",), may_repeat=True), back)
    assert found == [[(UD, 1, "a", 1), (UI, 1, "a", 1), (D, 2, "x", 1)], []]


def test_an_epoch_that_is_held_is_folded_as_it_comes_and_bounded() -> None:
    wanted = SinkInput(SinkMode.UPSERT, ("id",), ("email",))
    preprocessor = Preprocessor(wanted, fold_rows=4)
    for number in range(1000):
        change = (UD, 1, "a", number), (UI, 1, "a", number + 1)
        preprocessor.chunk(chunk(*change))
        assert preprocessor._rows <= 4
    assert changes(preprocessor.end_epoch()) == [(UD, 1, "a", 0), (UI, 1, "a", 1000)]
    small = Preprocessor(wanted, fold_rows=4, max_bytes=200)
    small.chunk(chunk(*((I, number, "a", 1) for number in range(3))))
    with pytest.raises(EpochTooLarge) as caught:
        small.chunk(chunk(*((I, number, "a", 1) for number in range(3, 20))))
    assert caught.value.nbytes > caught.value.limit == 200


def test_an_update_without_its_old_row_is_refused_where_the_old_row_is_needed() -> None:
    lone = chunk((UI, 1, "a", 2))
    assert given(SinkInput(SinkMode.UPSERT, ("id",), ("id",)), lone) == [[(UI, 1, "a", 2)], []]
    assert given(SinkInput(SinkMode.FORCE_APPEND_ONLY), lone) == [[(I, 1, "a", 2)], []]
    for wanted in (
        SinkInput(SinkMode.RETRACT, ("id",), ("id",)),
        SinkInput(SinkMode.UPSERT, ("id",), ("email",)),
        SinkInput(SinkMode.UPSERT, ("id",), ("id", "email")),
    ):
        with pytest.raises(SinkInputError, match="REPLICA IDENTITY FULL"):
            Preprocessor(wanted).chunk(lone)


def test_a_sink_that_replaces_rows_needs_keys() -> None:
    with pytest.raises(SinkInputError):
        SinkInput(SinkMode.UPSERT)
    with pytest.raises(SinkInputError):
        SinkInput(SinkMode.RETRACT, ("id",))
    assert Preprocessor(SinkInput(SinkMode.APPEND_ONLY)).chunk(chunk()) is None
