"""Offsets, progress and rewind delays: pure rules. Scenario numbers are those of the log store's catalogue."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headwater.log_store.errors import InvalidOffset, ProgressConflict
from headwater.log_store.offset import LogOffset, StoragePlace
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.log_store.rewind import REWIND_BASE_DELAY, REWIND_MAX_DELAY, RewindDelay
from headwater.stream import Epoch, VnodeBitmap

E1, E2, E3 = (Epoch.from_ms(number) for number in (1, 2, 3))
ALL = VnodeBitmap.full(8)
EVEN = VnodeBitmap.of(range(0, 8, 2), 8)


def test_20_offsets_are_ordered_by_epoch_then_chunk_and_a_barrier_ends_its_epoch() -> None:
    ordered = [LogOffset(E1, 0), LogOffset(E1, 1), LogOffset(E1, 99), LogOffset(E1), LogOffset(E2, 0), LogOffset(E2)]
    shuffled = [ordered[place] for place in (3, 0, 5, 1, 4, 2)]
    assert sorted(shuffled) == ordered
    for low, high in pairwise(ordered):
        assert low < high
        assert not high <= low


def test_an_item_follows_a_chunk_in_its_epoch_and_a_barrier_in_a_later_one() -> None:
    LogOffset(E1, 0).check_next_epoch(E1)
    LogOffset(E1).check_next_epoch(E3)
    for last, epoch in ((LogOffset(E1, 0), E2), (LogOffset(E2), E2), (LogOffset(E2), E1)):
        with pytest.raises(InvalidOffset):
            last.check_next_epoch(epoch)


def test_progress_goes_from_none_over_vnodes_to_aligned_and_back() -> None:
    progress = LogStoreVnodeProgress(8)
    assert progress.kind == "none"
    assert progress.minimum(ALL) is None
    progress.apply_per_vnode(E1, {0: 5, 3: 7})
    progress.apply_per_vnode(E1, {0: 9})
    assert progress.kind == "per_vnode"
    assert dict(progress.places()) == {0: StoragePlace(E1, 9), 3: StoragePlace(E1, 7)}
    assert progress.minimum(VnodeBitmap.of([0, 3], 8)) == StoragePlace(E1, 7)
    assert progress.minimum(ALL) is None
    progress.apply_aligned(ALL, E1)
    assert progress.kind == "aligned"
    assert progress.minimum(EVEN) == StoragePlace(E1)
    progress.apply_per_vnode(E2, {4: 0})
    assert progress.kind == "per_vnode"
    assert progress.place_of(4) == StoragePlace(E2, 0)
    assert progress.place_of(5) == StoragePlace(E1)
    assert progress.minimum(ALL) == StoragePlace(E1)


@pytest.mark.parametrize(
    ("epoch", "seqs"), [(E1, {0: 4}), (E2, {0: 0}), (Epoch(65536 * 3), {1: 1, 0: 1})], ids=["back", "leaves", "skips"]
)
def test_a_vnode_never_goes_back_and_leaves_an_epoch_only_at_its_end(epoch: Epoch, seqs: dict[int, int]) -> None:
    progress = LogStoreVnodeProgress(8)
    progress.apply_per_vnode(E1, {0: 5})
    before = dict(progress.places())
    with pytest.raises(ProgressConflict, match="Vnode 0"):
        progress.apply_per_vnode(epoch, seqs)
    assert dict(progress.places()) == before
    progress.apply_per_vnode(E1, {0: 5})  # the same place again: two chunks without rows for the vnode
    progress.apply_aligned(ALL, E1)
    progress.apply_per_vnode(E2, {0: 0})
    with pytest.raises(ProgressConflict):
        progress.apply_aligned(ALL, E1)


def test_an_aligned_place_covers_all_that_moved_and_may_cover_more() -> None:
    progress = LogStoreVnodeProgress.aligned(EVEN, StoragePlace(E1))
    with pytest.raises(ProgressConflict, match="cover"):
        progress.apply_aligned(VnodeBitmap.of([0], 8), E2)
    progress.apply_aligned(ALL, E2)
    assert progress.bitmap() == ALL


def test_take_gives_only_what_is_new() -> None:
    progress = LogStoreVnodeProgress(8)
    progress.apply_per_vnode(E1, {1: 1})
    assert progress.take() == LogStoreVnodeProgress(8, {1: StoragePlace(E1, 1)})
    assert progress.kind == "none"
    assert progress.take() == LogStoreVnodeProgress(8)


def test_m1_an_owner_speaks_only_for_its_own_vnodes() -> None:
    mine = LogStoreVnodeProgress.aligned(ALL, StoragePlace(E2)).restrict(EVEN)
    assert mine.bitmap() == EVEN
    assert mine.place_of(1) is None
    assert LogStoreVnodeProgress.aligned(EVEN, StoragePlace(E2)).restrict(~EVEN).kind == "none"
    per_vnode = LogStoreVnodeProgress(8, {0: StoragePlace(E1), 1: StoragePlace(E1)}).restrict(EVEN)
    assert list(per_vnode.places()) == [(0, StoragePlace(E1))]


def test_progress_survives_json() -> None:
    for progress in (
        LogStoreVnodeProgress(8),
        LogStoreVnodeProgress.aligned(EVEN, StoragePlace(E2)),
        LogStoreVnodeProgress(8, {0: StoragePlace(E1, 4), 1: StoragePlace(E2), 7: StoragePlace(E1, 4)}),
    ):
        assert LogStoreVnodeProgress.from_json(progress.to_json()) == progress


def test_m10_delays_double_from_one_second_to_three_minutes_with_full_jitter() -> None:
    delays = RewindDelay(jitter=lambda: 1.0)
    assert [delays.next(None) for _ in range(10)] == [1, 2, 4, 8, 16, 32, 64, 128, 180, 180]
    half = RewindDelay(jitter=lambda: 0.5)
    assert [half.next(None) for _ in range(3)] == [0.5, 1, 2]
    spread = RewindDelay()
    for _ in range(2000):
        assert 0 <= spread.next(None) < REWIND_MAX_DELAY


def test_m10_progress_resets_the_delay_the_first_progress_included() -> None:
    delays = RewindDelay(jitter=lambda: 1.0)
    assert [delays.next(None) for _ in range(3)] == [1, 2, 4]
    assert delays.next(LogOffset(E1, 0)) == REWIND_BASE_DELAY
    assert delays.next(LogOffset(E1, 0)) == 2
    assert delays.next(LogOffset(E1)) == REWIND_BASE_DELAY
    assert delays.next(LogOffset(E1)) == 2
    delays.reset()
    assert delays.next(None) == REWIND_BASE_DELAY
