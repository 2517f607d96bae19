"""One row per vnode; progress never goes back, and only what has changed is written."""

from __future__ import annotations

from itertools import count

import pytest

from headwater.backfill.snapshot.errors import ProgressWentBack, VnodeStateCorrupt
from headwater.backfill.snapshot.state import VNODES, BackfillState, VnodeProgress
from headwater.state import Catalog, StateTable, WriteBatch, open_writer
from headwater.stream import Epoch, VnodeBitmap

TABLE = "public.orders"
ALL = VnodeBitmap.full(4)
_stores = count()


class Stored:
    def __init__(self) -> None:
        self.store = open_writer(f"memory://snapshot-backfill-state-{next(_stores)}")
        self._epochs = count(1)

    def table(self) -> StateTable:
        with self.store.snapshot() as view:
            return BackfillState.open_table(Catalog.load(view), WriteBatch())

    def load(self, vnodes: VnodeBitmap = ALL, table: str = TABLE) -> BackfillState:
        with self.store.snapshot() as view:
            return BackfillState.load(BackfillState.open_table(Catalog.load(view), WriteBatch()), view, table, vnodes)

    def save(self, state: BackfillState) -> int:
        batch = WriteBatch()
        changed = state.save(batch)
        self.seal(batch)
        return changed

    def seal(self, batch: WriteBatch) -> None:
        self.store.seal(Epoch.from_ms(next(self._epochs)), batch)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, VnodeProgress(30, 0, b"a")),
        (None, VnodeProgress(30, 5)),
        (VnodeProgress(30, 1, b"a"), VnodeProgress(30, 1, b"b")),
        (VnodeProgress(30, 1, b"a"), VnodeProgress(30, 1)),
        (VnodeProgress(30, 1, b"b"), VnodeProgress(40, 0, b"a")),
        (VnodeProgress(30, 9), VnodeProgress(40, 1)),
        (VnodeProgress(30, 9), VnodeProgress(30, 9)),
        (VnodeProgress(30, 1, b"a"), VnodeProgress(30, 1, b"a")),
    ],
)
def test_progress_that_follows_is_taken(before: VnodeProgress | None, after: VnodeProgress) -> None:
    state = BackfillState(Stored().table(), TABLE, ALL, {} if before is None else {2: before})
    assert state.update(2, after) is (before != after)
    assert state.get(2) == after


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (VnodeProgress(30, 1, b"a"), VnodeProgress(20, 9), "epoch 20 after epoch 30"),
        (VnodeProgress(30, 9), VnodeProgress(20, 9), "epoch 20 after epoch 30"),
        (VnodeProgress(30, 2, b"a"), VnodeProgress(30, 1, b"b"), "1 rows of epoch 30 after 2"),
        (VnodeProgress(30, 2, b"a"), VnodeProgress(30, 1), "1 rows of epoch 30 after 2"),
        (VnodeProgress(30, 2, b"b"), VnodeProgress(30, 3, b"a"), "an earlier key"),
        (VnodeProgress(30, 2, b"b"), VnodeProgress(30, 3, b"b"), "an earlier key"),
        (VnodeProgress(30, 2), VnodeProgress(30, 3), "was finished"),
        (VnodeProgress(30, 2), VnodeProgress(30, 2, b"a"), "was finished"),
    ],
)
def test_progress_that_goes_back_is_refused(before: VnodeProgress, after: VnodeProgress, why: str) -> None:
    state = BackfillState(Stored().table(), TABLE, ALL, {2: before})
    with pytest.raises(ProgressWentBack, match=why):
        state.update(2, after)
    assert state.get(2) == before


def test_rows_come_back_as_they_were_and_only_what_changed_is_written() -> None:
    stored = Stored()
    state = stored.load()
    assert [row for _, row in state.items()] == [None] * 4
    state.update(0, VnodeProgress(30, 1, b"k\x00c"))
    state.update(1, VnodeProgress(30, 1))
    assert state.is_changed
    assert stored.save(state) == 2
    assert stored.save(state) == 0
    state.update(0, VnodeProgress(30, 2, b"k\x00d"))
    assert stored.save(state) == 1
    again = stored.load()
    assert dict(again.items()) == {
        0: VnodeProgress(30, 2, b"k\x00d"),
        1: VnodeProgress(30, 1),
        2: None,
        3: None,
    }
    assert (again.has_finished(30), again.rows_of(30)) == (False, 3)


def test_all_vnodes_finish_an_epoch_together() -> None:
    state = Stored().load()
    state.finish(30)
    assert (state.has_finished(30), state.has_finished(40)) == (True, False)
    state.finish(40)
    assert state.has_finished(30)
    assert state.has_finished(40)


def test_what_was_planned_and_not_read_is_taken_back() -> None:
    stored = Stored()
    state = stored.load()
    state.update(0, VnodeProgress(30, 5, b"b"))
    state.update(1, VnodeProgress(30, 5))
    stored.save(state)
    state.update(0, VnodeProgress(30, 9))
    state.take_back(0, VnodeProgress(30, 5, b"b"))
    state.take_back(1, None)
    assert stored.save(state) == 1
    assert dict(stored.load().items()) == {0: VnodeProgress(30, 5, b"b"), 1: None, 2: None, 3: None}


def test_two_tables_of_one_store_know_nothing_of_each_other() -> None:
    stored = Stored()
    one, two = stored.load(), stored.load(table=TABLE + "2")
    one.finish(30)
    two.update(3, VnodeProgress(40, 1))
    stored.save(one)
    stored.save(two)
    batch = WriteBatch()
    BackfillState.forget(stored.table(), batch, TABLE)
    stored.seal(batch)
    assert stored.load().get(3) is None
    assert stored.load(table=TABLE + "2").get(3) == VnodeProgress(40, 1)


def test_a_stored_row_without_a_next_key_is_damage_and_one_too_many_is_ignored() -> None:
    stored = Stored()
    with stored.store.snapshot() as view:
        batch = WriteBatch()
        states = Catalog.load(view).open_or_create(VNODES, batch)
    states.put(batch, 0, (TABLE, 0), (30, 1, True, b"left over"))
    stored.seal(batch)
    assert stored.load().get(0) == VnodeProgress(30, 1)
    batch = WriteBatch()
    states.put(batch, 0, (TABLE, 1), (30, 1, False, None))
    stored.seal(batch)
    with pytest.raises(VnodeStateCorrupt, match="vnode 1"):
        stored.load()
