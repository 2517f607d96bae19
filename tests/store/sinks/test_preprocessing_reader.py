"""A sink is given the right rows whether the log has them in memory, spilled or as history, at any rate."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa
import pytest
from tests.store.sinks.tools import Outside, Pipe, Row, changes_of

from headwater.log_store.item import BarrierItem, ChunkItem
from headwater.log_store.protocols import LogReader
from headwater.log_store.rate_limit import RateLimitedReader
from headwater.log_store.testing import KEY, SCHEMA, epoch
from headwater.sinks import Folding, PreprocessingReader, Preprocessor, SinkControl, SinkInput, SinkInputError, SinkMode
from headwater.state import StateStore
from headwater.stream import Chunk, Op

Reopen = Callable[[], StateStore]
I, D, UI, UD = Op.INSERT, Op.DELETE, Op.UPDATE_INSERT, Op.UPDATE_DELETE  # noqa: E741
BY_KEY = SinkInput(SinkMode.UPSERT, ("id",), ("id",))
BY_NAME = SinkInput(SinkMode.RETRACT, ("id",), ("name",))


def chunk(*changes: tuple[Op, int, str]) -> Chunk:
    arrays = [pa.array([row[place] for row in changes], kind) for place, kind in ((1, pa.int64()), (2, pa.string()))]
    return Chunk.build(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), [row[0] for row in changes], KEY)


def until_barrier(reader: LogReader) -> tuple[list[list[Row]], BarrierItem]:
    found = []
    while isinstance(item := reader.next_item(5), ChunkItem):
        found.append(changes_of(item.chunk))
    assert isinstance(item, BarrierItem)
    return found, item


def begun(pipe: Pipe, wanted: SinkInput) -> PreprocessingReader:
    reader = PreprocessingReader(pipe.reader, Preprocessor(wanted))
    reader.init(5)
    reader.start_from()
    return reader


@pytest.mark.parametrize("where", ["memory", "spilled", "history"])
def test_42_chunks_that_the_log_has_joined_are_folded_again(reopen: Reopen, log_format: int, where: str) -> None:
    pipe = Pipe.open(reopen(), 1, log_format, max_rows=0 if where == "spilled" else 1000)
    pipe.write(2, chunk((D, 1, "a")), chunk((I, 1, "b"), (I, 2, "x")), chunk((D, 1, "b")), chunk((D, 2, "x")))
    if where == "history":
        pipe = Pipe.open(reopen(), 2, log_format)
    found, _ = until_barrier(begun(pipe, BY_KEY))
    keys = [[row[1] for row in rows] for rows in found]
    assert all(len(set(some)) == len(some) for some in keys), "two changes of a key in one chunk"
    if where == "spilled" or (where, log_format) == ("history", 1):
        assert found == [[(D, 1, "a")]]
    else:
        in_order = [sorted(rows) for rows in found]
        assert in_order == [[(D, 1, "a")], [(I, 1, "b"), (I, 2, "x")], [(D, 1, "b")], [(D, 2, "x")]]


@pytest.mark.parametrize("where", ["memory", "spilled", "history"])
@pytest.mark.parametrize("mode", [SinkMode.UPSERT, SinkMode.RETRACT])
def test_39_40_the_epoch_of_a_sink_with_another_key_is_in_order(
    reopen: Reopen, log_format: int, where: str, mode: SinkMode
) -> None:
    pipe = Pipe.open(reopen(), 1, log_format, max_rows=0 if where == "spilled" else 1000)
    pipe.write(2, chunk((I, 1, "a")), chunk((I, 2, "b")))
    pipe.write(3, chunk((UD, 1, "a"), (UI, 1, "b")), chunk((UD, 2, "b"), (UI, 2, "a")))
    pipe.write(4, is_checkpoint=False)
    pipe.write(5, chunk((I, 3, "a")), chunk((D, 2, "a")), chunk((I, 4, "z")), chunk((D, 4, "z")))
    if where == "history":
        pipe = Pipe.open(reopen(), 5, log_format)
    reader = begun(pipe, SinkInput(mode, ("id",), ("name",)))
    (first,), barrier = until_barrier(reader)
    assert (sorted(first), barrier.epoch) == ([(I, 1, "a"), (I, 2, "b")], epoch(1))
    (second,), barrier = until_barrier(reader)
    pairs = {tuple(second[:2]), tuple(second[2:])}
    assert pairs == {((UD, 1, "a"), (UI, 2, "a")), ((UD, 2, "b"), (UI, 1, "b"))}
    reader.truncate(barrier.offset)
    assert until_barrier(reader)[0] == []
    (last,), barrier = until_barrier(reader)
    assert last == [(UD, 2, "a"), (UI, 3, "a")]
    reader.rewind()
    reader.start_from()
    assert until_barrier(reader)[0] == []
    item = reader.next_item(5)
    assert isinstance(item, ChunkItem)
    assert changes_of(item.chunk) == last, "the epoch comes again, whole"


def test_a_folded_epoch_that_was_truncated_leaves_its_barrier(reopen: Reopen, log_format: int) -> None:
    pipe = Pipe.open(reopen(), 1, log_format)
    pipe.write(2, chunk((I, 1, "a")), chunk((I, 2, "b")))
    reader = begun(pipe, BY_NAME)
    item = reader.next_item(5)
    assert isinstance(item, ChunkItem)
    reader.truncate(item.offset)
    reader.rewind()
    reader.start_from()
    found, barrier = until_barrier(reader)
    assert (found, barrier.epoch) == ([], epoch(1))
    pipe.write(3)
    pipe.write(4)
    again = begun(Pipe.open(reopen(), 4, log_format), BY_NAME)
    assert until_barrier(again)[0] == [], "durable as well"


@pytest.mark.parametrize("rate", [None, 50_000])
@pytest.mark.parametrize("folding", list(Folding))
@pytest.mark.parametrize("max_rows", [0, 40])
def test_44_whatever_is_folded_the_table_is_the_same(
    reopen: Reopen, log_format: int, folding: Folding, max_rows: int, rate: int | None
) -> None:
    rng = random.Random(5)
    pipe = Pipe.open(reopen(), 1, log_format, max_rows=max_rows)
    table: dict[int, str] = {}
    for number in range(1, 8):
        chunks = []
        for _ in range(4):
            changes: list[tuple[Op, int, str]] = []
            for _ in range(12):
                key, name = rng.randrange(15), f"name {rng.randrange(1000)}"
                if key not in table:
                    changes.append((I, key, name))
                elif rng.random() < 0.4:
                    changes.append((D, key, table[key]))
                else:
                    changes += ((UD, key, table[key]), (UI, key, name))
                table[key] = name
                if changes[-1][0] is D:
                    del table[key]
            chunks.append(chunk(*changes))
        pipe.write(number + 1, *chunks, is_checkpoint=number % 2 == 1, is_stop=number == 7)
    calls = iter(range(1000))

    def fail(*_: object) -> None:
        if next(calls) in (2, 7):
            raise OSError("no route")

    outside = Outside(on_write=fail)
    wanted = SinkInput(SinkMode.UPSERT, ("id",), ("id",), folding)
    reader = RateLimitedReader(PreprocessingReader(pipe.reader, Preprocessor(wanted)), rate)
    loop = pipe.loop(outside.build, reader=reader)
    loop.run()
    assert outside.table() == table
    assert loop.status.failures >= 1


def test_a_change_that_the_sink_cannot_take_is_an_error_that_is_seen(reopen: Reopen) -> None:
    pipe = Pipe.open(reopen(), 1, 2)
    pipe.write(2, chunk((I, 1, "a")), chunk((D, 1, "a")), is_stop=True)
    outside = Outside()
    reader = PreprocessingReader(pipe.reader, Preprocessor(SinkInput(SinkMode.APPEND_ONLY)))
    control = SinkControl()
    loop = pipe.loop(outside.build, reader=reader, control=control, sleep=lambda _: control.stop())
    loop.run()
    assert loop.status.last_failure is not None
    assert isinstance(loop.status.last_failure.error, SinkInputError)
    assert outside.rows == []
