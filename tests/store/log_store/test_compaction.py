"""Key compaction of a backlog."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.logs import LogConsumer, epoch, random_chunk
from tests.store.log_store.tools import Row, Table, chunk, final_state

from headwater.log_store import ForeignSchema, KvLogStoreFactory, LogView, WrongCall
from headwater.log_store import compaction as compaction_module
from headwater.log_store.compaction import Compaction
from headwater.log_store.migration import Migration
from headwater.state import open_writer
from headwater.stream import Chunk, EpochPair, Op, VnodeBitmap

INS, DEL, UI, UD = Op.INSERT, Op.DELETE, Op.UPDATE_INSERT, Op.UPDATE_DELETE


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    made = Table(f"memory://{uuid.uuid4()}", log_format=request.param)
    yield made
    made.close()


def churn(rng: random.Random, rows: int, keys: int) -> Chunk:
    """Changes of few keys, as a busy table has them."""
    made: list[tuple[Op, int, str]] = []
    for _ in range(rows):
        key, name = rng.randrange(keys), f"name {rng.randrange(1000)}"
        made += rng.choice([[(INS, key, name)], [(DEL, key, name)], [(UD, key, "old"), (UI, key, name)]])
    return chunk(made)


def compact(table: Table, **options: Any) -> Compaction:
    compaction = Compaction(table.factory, "orders")
    while not compaction.step(**options):
        table.seal()
    table.seal()
    return compaction


def test_only_the_newest_row_of_a_key_stays_where_it_was(table: Table) -> None:
    table.write(chunk([(INS, 1, "a"), (INS, 2, "b"), (UD, 1, "a"), (UI, 1, "c")]))
    table.write(chunk([(DEL, 2, "b"), (INS, 3, "d")]))
    before = table.rows()
    compaction = compact(table)
    assert [(row[1] >> 16, row[4], Op(row[3]), row[5]) for row in sorted(table.rows(), key=lambda row: row[4])] == [
        (1, 1, INS, "c"),  # the other half of its pair is gone
        (2, 2, DEL, "b"),
        (2, 3, INS, "d"),
    ]
    assert {row[:3] for row in table.rows()} <= {row[:3] for row in before}
    saved = compaction.saved
    assert (saved.epochs, saved.rows_before, saved.rows) == (2, 6, 3)
    assert saved.bytes < saved.bytes_before


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_rows", [1, 400, 1_000_000])
def test_whoever_replays_ends_with_the_same_table(table: Table, seed: int, max_rows: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        table.write(churn(rng, 100, 50), churn(rng, 30, 200))
    before = table.rows()
    saved = compact(table, max_rows=max_rows).saved
    after = table.rows()
    assert saved.rows == len(after) < len(before) == saved.rows_before
    assert {row[:3] for row in after} <= {row[:3] for row in before}
    for start in range(7):  # wherever a consumer is
        held = final_state([row for row in before if row[1] <= epoch(start)])
        replayed = final_state([row for row in after if row[1] > epoch(start)], held)
        assert replayed == final_state(before)
    with table.store.snapshot() as view:
        ends = [end for end in LogView.open(view, "orders").epochs() if end.rows]
    assert sum(end.rows for end in ends) == len(after)
    assert all(end.compacted for end in ends[:-1])
    assert compact(table, max_rows=max_rows).saved.rows <= len(after)  # smaller epochs make longer runs


def test_pairs_stay_valid_in_every_chunk(table: Table) -> None:
    rng = random.Random(9)
    for _ in range(4):
        table.write(churn(rng, 200, 100))
    compact(table)
    with table.store.snapshot() as view:
        shown = LogView.open(view, "orders")
        for batch in shown.read_range(0, shown.sealed):
            rows = batch.drop_columns(["_op", "_vnode", "_seq", "_epoch"])
            Chunk(rows, batch.column("_op"), batch.column("_vnode"))  # says what is wrong


def test_an_epoch_that_a_pin_shows_is_left_alone(table: Table) -> None:
    table.write(chunk([(INS, 1, "a"), (INS, 1, "b")]))
    table.store.pin("somebody")
    table.write(chunk([(INS, 1, "c"), (INS, 1, "d")]))
    assert compact(table).saved.epochs_left_alone == 1
    assert [row[5] for row in sorted(table.rows(), key=lambda row: row[:3])] == ["a", "b", "d"]


def test_an_epoch_that_a_consumer_is_inside_of_is_left_alone(table: Table) -> None:
    for name in "abc":
        table.write(chunk([(INS, 1, name), (INS, 1, name + name)]))
    with LogConsumer.open(table.location, "orders", "sink") as consumer:
        consumer.commit(epoch(1))
        consumer.commit(epoch(2), VnodeBitmap.of(range(128), 256))
        assert compact(table).saved.epochs_left_alone == 1
    assert [row[5] for row in sorted(table.rows(), key=lambda row: row[:3])] == ["b", "bb", "cc"]


def test_a_log_that_is_being_migrated_or_has_no_key_is_refused(tmp_path: Path) -> None:
    made = Table(str(tmp_path / "store"), log_format=1)
    made.write()
    Migration(made.factory, "orders").step(0)
    with pytest.raises(WrongCall, match="headwater log migrate"):
        Compaction(made.factory, "orders").step()
    made.factory.log("keyless", pa.schema([("id", pa.int64())]), ())
    with pytest.raises(ForeignSchema):
        Compaction(made.factory, "keyless")
    made.close()


def test_keys_of_many_types_and_large_epochs(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.decimal128(22, 2)), ("c", pa.bool_()), ("v", pa.int64())])
    count, keys = 150_000, 70_000
    with open_writer(tmp_path / "store") as store:
        factory = KvLogStoreFactory(store)
        log = factory.log("wide", schema, ("a", "b", "c"))
        writer = factory.writer(log)
        writer.init(EpochPair(epoch(1), epoch(0)))
        number = pa.array([place % keys for place in range(count)])
        columns = [number.cast(pa.string()), number.cast(pa.decimal128(22, 2)), pa.array([None] * count, pa.bool_())]
        rows = pa.RecordBatch.from_arrays([*columns, pa.array(range(count), pa.int64())], schema=schema)
        writer.write_chunk(Chunk.inserts(rows, ("a", "b", "c")))
        writer.end_epoch(epoch(2))
        factory.sealer.seal(epoch(1))
        compaction = Compaction(factory, "wide")
        assert compaction.step()
        factory.sealer.seal(epoch(2))
        assert compaction.saved.rows == keys
        got: list[tuple[int, int, int]] = []
        with store.snapshot() as view:
            for batch in LogView.open(view, "wide").read_range(0, epoch(2)):
                got += zip(*(batch.column(name).to_pylist() for name in ("_vnode", "_seq", "v")), strict=True)
        assert sorted(value for _, _, value in got) == list(range(count - keys, count))
        seqs: dict[int, list[int]] = {}
        for vnode, seq, _ in got:
            seqs.setdefault(vnode, []).append(seq)
        assert all(found == sorted(found) for found in seqs.values())


@pytest.mark.parametrize("seed", range(3))
def test_large_rows_are_written_as_chunks_of_whole_vnodes(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction_module, "CHUNK_BYTES", 100)
    rng = random.Random(seed)
    made = Table(str(tmp_path / "store"))
    for _ in range(3):
        made.write(churn(rng, 300, 90), churn(rng, 100, 300))
    before = made.rows()
    compact(made)
    after = made.rows_in_order()
    assert final_state(after) == final_state(before)
    assert {row[:3] for row in after} <= {row[:3] for row in before}
    per_vnode: dict[int, list[tuple[int, int]]] = {}
    for vnode, at, seq, *_ in after:
        per_vnode.setdefault(vnode, []).append((at, seq))
    assert all(places == sorted(places) for places in per_vnode.values())
    assert made.raw(1) > 20
    made.close()


def test_a_compacted_log_can_be_migrated(tmp_path: Path) -> None:
    made = Table(str(tmp_path / "store"), log_format=1)
    for _ in range(3):
        made.write(churn(random.Random(5), 50, 10), random_chunk(made.rng))
    compact(made)
    before: list[Row] = made.rows()
    migration = Migration(made.factory, "orders")
    while not migration.step():
        made.seal()
    made.seal()
    assert made.rows() == before
    made.close()


@pytest.mark.parametrize(
    ("changes", "op"),
    [
        ([Op.UPDATE_INSERT], Op.UPDATE_INSERT),
        ([Op.UPDATE_INSERT, Op.UPDATE_INSERT], Op.UPDATE_INSERT),
        ([Op.UPDATE_INSERT, Op.DELETE, Op.INSERT], Op.UPDATE_INSERT),
        ([Op.INSERT, Op.UPDATE_INSERT], Op.INSERT),
        ([Op.DELETE, Op.UPDATE_INSERT], Op.INSERT),
        ([Op.UPDATE_INSERT, Op.DELETE], Op.DELETE),
    ],
    ids=str,
)
def test_an_update_without_its_old_row_stays_one_as_in_a_stream(table: Table, changes: list[Op], op: Op) -> None:
    for number, change in enumerate(changes):
        table.write(chunk([(change, 7, str(number)), (Op.INSERT, 1000 + number, "other"), (Op.INSERT, 1, str(number))]))
    compact(table)
    assert [(row[3], row[5]) for row in table.rows() if row[4] == 7] == [(op, str(len(changes) - 1))]
