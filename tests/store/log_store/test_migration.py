"""From format 1 to format 2 while the log is in use."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.logs import LogConsumer, epoch, random_chunk
from tests.store.log_store.tools import Table, final_state, flat

from headwater import failpoints
from headwater.log_store import KvLogStoreFactory, LogNotFound, LogStoreRowSerde, UnknownVersion, read_range
from headwater.log_store.chunk_codec import decode_header
from headwater.log_store.compaction import Compaction
from headwater.log_store.migration import Migration
from headwater.state import open_writer


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table(f"memory://{uuid.uuid4()}", log_format=1)
    yield made
    failpoints.arm("")
    made.close()


def test_old_epochs_are_rewritten_and_every_row_stays_what_it_was(table: Table) -> None:
    for _ in range(5):
        table.write()
    before = table.rows()
    migration = Migration(table.factory, "orders")
    steps = 0
    while not migration.step(2):
        table.seal()
        steps += 1
        assert table.rows() == before
    table.seal()
    assert steps >= 3
    assert set(table.formats().values()) == {(2,)}
    assert table.rows() == before
    assert table.raw(0) == 0
    assert not table.factory.existing("orders").may_hold_rows
    assert migration.progress.epochs_left == 0
    assert migration.step()


def test_an_epoch_has_one_format_and_the_next_one_is_the_new(table: Table) -> None:
    table.write()
    table.writer.write_chunk(random_chunk(table.rng, 20))  # in the middle of an epoch
    Migration(table.factory, "orders").step(0)
    middle = table.write()
    last = table.write()
    assert table.formats() == {1: (1,), middle: (1,), last: (2,)}
    assert {row[1] >> 16 for row in table.rows()} == {1, 2, 3}


def test_the_order_within_a_vnode_stays(table: Table) -> None:
    for _ in range(3):
        table.write(rows=500)
    migration = Migration(table.factory, "orders")
    while not migration.step(1):
        table.seal()
    table.seal()
    per_vnode: dict[int, list[tuple[int, int]]] = {}
    for vnode, at, seq, *_ in table.rows_in_order():
        per_vnode.setdefault(vnode, []).append((at, seq))
    assert all(places == sorted(places) for places in per_vnode.values())


@pytest.mark.parametrize("after_steps", [0, 1, 2, 3])
def test_a_writer_that_dies_leaves_whole_epochs_and_the_next_one_goes_on(table: Table, after_steps: int) -> None:
    for _ in range(4):
        table.write()
    before = table.rows()
    migration = Migration(table.factory, "orders")
    for _ in range(after_steps):
        migration.step(1)
        table.seal()
    migration.step(1)  # never sealed
    table.open(takeover=True)
    assert table.rows() == before
    migration = Migration(table.factory, "orders")
    while not migration.step(1):
        table.seal()
    table.seal()
    assert table.rows() == before
    assert set(table.formats().values()) == {(2,)}
    assert table.raw(0) == 0


def test_what_a_dead_migration_had_staged_is_seen_by_nobody(table: Table) -> None:
    table.write(rows=3000)
    table.write(rows=3000)
    before = table.rows()
    failpoints.arm("log_store.migrate_staged=raise@2")
    with pytest.raises(failpoints.FailpointError):
        Migration(table.factory, "orders", stage_bytes=1).step()
    failpoints.arm("")
    table.open(takeover=True)
    assert table.raw(1) > 0
    assert table.rows() == before
    migration = Migration(table.factory, "orders")
    while not migration.step():
        table.seal()
    table.seal()
    assert table.rows() == before


def test_what_is_truncated_in_the_same_seal_does_not_come_back(table: Table) -> None:
    for _ in range(4):
        table.write()
    with LogConsumer.open(table.location, "orders", "sink") as consumer:
        consumer.commit(epoch(3))
    table.write()  # announces epoch 3
    table.write(seal=False)
    migration = Migration(table.factory, "orders")
    migration.step(100)
    table.factory.sealer.seal(epoch(table.next - 1))
    assert min(table.formats()) == 4
    assert min(row[1] for row in table.rows()) == epoch(4)


def test_truncation_while_a_log_is_migrated_leaves_no_rows_behind(table: Table) -> None:
    for _ in range(4):
        table.write()
    Migration(table.factory, "orders").step(1)
    table.seal()
    with LogConsumer.open(table.location, "orders", "sink") as consumer:
        consumer.commit(epoch(4))
    table.seal()
    table.seal()
    assert min(table.formats()) == 5
    table.seal()
    assert table.raw(0) == 0


def test_a_consumer_that_reads_meanwhile_gets_every_row_once(table: Table) -> None:
    for _ in range(6):
        table.write()
    before = table.rows()
    migration = Migration(table.factory, "orders")
    with LogConsumer.open(table.location, "orders", "sink") as consumer:
        batches = consumer.read(epoch(0), epoch(6))
        got = list(flat(iter([next(batches)])))
        done = False
        while not done:
            done = migration.step(2)
            table.seal()
        got += flat(batches)
        assert sorted(got) == before
        assert sorted(flat(consumer.read(epoch(0), epoch(6)))) == before


@pytest.mark.parametrize("in_background", [False, True])
def test_a_capture_loop_migrates_while_it_writes(tmp_path: Path, in_background: bool) -> None:
    made = Table(str(tmp_path / "store"), log_format=1, max_bytes=4000)
    for _ in range(30):
        made.write()
    migration = Migration(made.factory, "orders", stage_bytes=2000)
    written, lefts, steps, migrated = made.rows(), [], 0, False
    with LogConsumer.open(made.location, "orders", "mirror") as mirror:
        while not migrated and steps < 40:
            chunk = random_chunk(made.rng, 40)
            number = made.next
            made.writer.write_chunk(chunk)
            if steps % 5 == 4:  # in the middle of an epoch, too
                migration.step(1)
            made.writer.end_epoch(epoch(number + 1))
            made.next += 1
            migrated = migration.step(max_epochs=3)
            lefts.append(migration.progress.epochs_left)
            if steps % 4 == 3:
                steps += 1
                continue  # a barrier without a seal
            (made.factory.sealer.seal_in_background if in_background else made.factory.sealer.seal)(epoch(number))
            steps += 1
        made.factory.sealer.wait()
        made.seal()
        assert migrated
        assert steps > 10, "a few epochs at a time"
        assert lefts == sorted(lefts, reverse=True)
        assert (lefts[0], lefts[-1]) == (27, 0)
        assert migration.progress.epochs >= 30
        assert made.raw(0) == 0
        assert {formats for number, formats in made.formats().items() if number <= made.next - 2} == {(2,)}
        rows = made.rows()
        assert [row for row in rows if row[1] <= epoch(30)] == written
        assert len(rows) == len(written) + 40 * steps
        after, upto = mirror.wait(0.0)
        assert sorted(flat(mirror.read(after, upto))) == rows
    made.close()


def test_a_new_writer_after_the_switch_writes_the_new_format_whatever_it_was_given(table: Table) -> None:
    table.write()
    old = table.log
    Migration(table.factory, "orders").step()
    assert table.factory.writer(old).store_state.log.format == 2


def test_a_log_of_format_2_and_one_that_does_not_exist(tmp_path: Path) -> None:
    made = Table(str(tmp_path / "store"))
    made.write()
    assert Migration(made.factory, "orders").step()
    with pytest.raises(LogNotFound):
        Migration(made.factory, "customers")
    made.close()


def test_both_versions_behind_one_serde(tmp_path: Path) -> None:
    with open_writer("memory://serde") as store:
        factory = KvLogStoreFactory(store)
        log = factory.log("orders", random_chunk(random.Random(1)).schema, ("id",))
    chunk = random_chunk(random.Random(2), 300)
    one, two = (LogStoreRowSerde(log, version) for version in (1, 2))
    rows, chunks = one.encode(epoch(1), 0, 5, chunk), two.encode(epoch(1), 0, 5, chunk)
    assert (len(rows), len(chunks)) == (300, 1)
    assert {LogStoreRowSerde.version_of(value) for _, value in rows} == {1}
    assert LogStoreRowSerde.version_of(chunks[0][1]) == 2
    decoded = [next(one.decode_rows(sorted(rows))).to_pydict()]
    value = chunks[0][1]
    found = [batch.to_pydict() for _, batch in two.decode_chunks([(0, value, decode_header(value))], None)]
    decoded.append({name: [value for part in found for value in part[name]] for name in found[0]})
    assert decoded[0] == decoded[1]
    assert sorted(decoded[0]["_seq"]) == list(range(5, 305))
    assert list(one.decode_rows([])) == []
    for value in (b"\x03rest", b"\x00"):
        with pytest.raises(UnknownVersion, match="Upgrade"):
            LogStoreRowSerde.version_of(value)
    with pytest.raises(UnknownVersion):
        LogStoreRowSerde(log, 3)


def test_on_an_object_store_too(tmp_path: Path) -> None:
    location = f"slatedb+file://{tmp_path}/store"
    made = Table(location, log_format=1)
    for _ in range(3):
        made.write()
    before = made.rows()
    migration = Migration(made.factory, "orders")
    while not migration.step(1):
        made.seal()
    made.seal()
    assert made.rows() == before
    assert set(made.formats().values()) == {(2,)}
    compaction = Compaction(made.factory, "orders")
    assert compaction.step()
    made.seal()
    after = made.rows()
    assert final_state(after) == final_state(before)
    made.close()
    got = sorted(flat(read_range(location, "orders", 0, epoch(made.next - 1))))
    assert got == after
