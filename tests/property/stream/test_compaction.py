"""Compaction by key against a plain model, row by row."""

from __future__ import annotations

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import given, settings

from headwater.stream import Chunk, Op, compact, deletes_before_inserts, force_append_only

Row = tuple[int, int, int]
Change = tuple[Op, Row]


def _batch(rows: list[Row]) -> pa.RecordBatch:
    arrays = [pa.array([row[place] for row in rows], pa.int64()) for place in range(3)]
    return pa.RecordBatch.from_arrays(arrays, names=["id", "sink", "v"])


def _changes(chunk: Chunk) -> list[Change]:
    return [
        (Op(op), (row["id"], row["sink"], row["v"]))
        for op, row in zip(chunk.ops.to_pylist(), chunk.rows.to_pylist(), strict=True)
    ]


@st.composite
def chunks(draw: st.DrawFn, consistent: bool = True) -> list[Chunk]:
    """Chunks of one epoch; if *consistent*, of a table that has each id once and each value of ``sink`` once."""
    table: dict[int, Row] = {}
    if consistent:
        table = {key: (key, key, 0) for key in draw(st.sets(st.integers(0, 4)))}
    made: list[Chunk] = []
    for size in draw(st.lists(st.integers(0, 8), min_size=1, max_size=4)):
        rows: list[Row] = []
        ops: list[Op] = []
        for _ in range(size):
            key = draw(st.integers(0, 5))
            new = (key, draw(st.integers(0, 5)), draw(st.integers(0, 2)))
            old = table.get(key) if consistent else draw(st.one_of(st.none(), st.just((key, new[1], 1))))
            if consistent and new[1] in {row[1] for other, row in table.items() if other != key}:
                continue
            if old is None:
                told = Op.INSERT if consistent or draw(st.booleans()) else Op.UPDATE_INSERT
                rows, ops = [*rows, new], [*ops, told]
                table[key] = new
            elif draw(st.booleans()):
                rows, ops = [*rows, old], [*ops, Op.DELETE]
                table.pop(key, None)
            else:
                rows, ops = [*rows, old, new], [*ops, Op.UPDATE_DELETE, Op.UPDATE_INSERT]
                table[key] = new
        made.append(Chunk.build(_batch(rows), ops, ("id",)))
    return made


def _model(given: list[Change], place: int, keep_unchanged: bool, keep_vanished: bool) -> dict[int, list[Change]]:
    by_key: dict[int, list[Change]] = {}
    lone = set()
    for at, change in enumerate(given):
        if change[0] is Op.UPDATE_INSERT and at and given[at - 1][0] is Op.UPDATE_DELETE:
            change = (Op.INSERT, change[1])
        elif change[0] is Op.UPDATE_INSERT and change[1][place] not in by_key:
            lone.add(change[1][place])
        by_key.setdefault(change[1][place], []).append(change)
    net: dict[int, list[Change]] = {}
    for key, found in by_key.items():
        (first_op, first), (last_op, last) = found[0], found[-1]
        if not first_op.adds and last_op.adds:
            if first != last or keep_unchanged:
                net[key] = [(Op.UPDATE_DELETE, first), (Op.UPDATE_INSERT, last)]
        elif last_op.adds:
            net[key] = [(Op.UPDATE_INSERT if key in lone else Op.INSERT, last)]
        elif not first_op.adds:
            net[key] = [(Op.DELETE, first)]
        elif keep_vanished or key in lone:
            net[key] = [(Op.DELETE, last)]
    return net


@given(st.one_of(chunks(), chunks(consistent=False)), *[st.booleans()] * 4)
def test_each_key_has_its_net_change(
    parts: list[Chunk], by_sink: bool, keep_unchanged: bool, keep_vanished: bool, deletes_first: bool
) -> None:
    names, place = (("sink",), 1) if by_sink else (("id",), 0)
    found = compact(
        parts, names, keep_unchanged=keep_unchanged, keep_vanished=keep_vanished, deletes_first=deletes_first
    )
    expected = _model(_changes(Chunk.concat(parts)), place, keep_unchanged, keep_vanished)
    got: dict[int, list[Change]] = {}
    for change in _changes(found):
        got.setdefault(change[1][place], []).append(change)
    assert got == expected
    if deletes_first:
        deletes = [op is Op.DELETE for op, _ in _changes(found)]
        assert deletes == sorted(deletes, reverse=True)
    options = {"keep_unchanged": True, "keep_vanished": True, "deletes_first": deletes_first}
    assert compact(found, names, **options) == found, "a second time changes nothing"


@given(chunks())
def test_applied_by_the_sinks_key_the_epoch_gives_the_table_of_the_stream(parts: list[Chunk]) -> None:
    """What a sink with another key is given: folded by the stream's key, deletes first, folded by its own key."""
    whole = _changes(Chunk.concat(parts))
    existed: dict[int, Row] = {}
    added: set[int] = set()
    for op, row in whole:
        if not op.adds and row[0] not in added:
            existed.setdefault(row[0], row)
        added.add(row[0])
    by_id = dict(existed)
    for op, row in whole:
        if op.adds:
            by_id[row[0]] = row
        else:
            by_id.pop(row[0])
    table = {row[1]: row for row in existed.values()}
    net = compact(deletes_before_inserts(compact(parts, ("id",))), ("sink",))
    for op, row in _changes(net):
        if op.adds:
            table[row[1]] = row
        else:
            assert table.pop(row[1]) == row, "a retraction names the row that is there"
    assert table == {row[1]: row for row in by_id.values()}


@settings(max_examples=50)
@given(chunks(consistent=False))
def test_append_only_is_what_was_added(parts: list[Chunk]) -> None:
    whole = Chunk.concat(parts)
    assert _changes(force_append_only(whole)) == [(Op.INSERT, row) for op, row in _changes(whole) if op.adds]
