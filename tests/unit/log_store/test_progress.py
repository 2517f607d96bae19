"""Progress: pure rules. Scenario numbers are those of the log store's catalogue."""

from __future__ import annotations

import pytest

from headwater.log_store.errors import ProgressConflict
from headwater.log_store.progress import LogStoreVnodeProgress, StoragePlace
from headwater.stream import Epoch, VnodeBitmap

E1, E2, E3 = (Epoch.from_ms(number) for number in (1, 2, 3))
ALL = VnodeBitmap.full(8)
EVEN = VnodeBitmap.of(range(0, 8, 2), 8)


def test_progress_goes_from_none_over_vnodes_to_aligned_and_back() -> None:
    progress = LogStoreVnodeProgress(8)
    assert progress.kind == "none"
    assert progress.minimum(ALL) is None
    progress = LogStoreVnodeProgress(8, {0: StoragePlace(E1, 9), 3: StoragePlace(E1, 7)})
    assert progress.kind == "per_vnode"
    assert dict(progress.places()) == {0: StoragePlace(E1, 9), 3: StoragePlace(E1, 7)}
    assert progress.minimum(VnodeBitmap.of([0, 3], 8)) == StoragePlace(E1, 7)
    assert progress.minimum(ALL) is None
    progress.apply_aligned(ALL, E1)
    assert progress.kind == "aligned"
    assert progress.minimum(EVEN) == StoragePlace(E1)
    progress.apply_ended(VnodeBitmap.of([4], 8), E2)
    assert progress.kind == "per_vnode"
    assert progress.place_of(4) == StoragePlace(E2)
    assert progress.place_of(5) == StoragePlace(E1)
    assert progress.minimum(ALL) == StoragePlace(E1)


@pytest.mark.parametrize(("epoch", "seq"), [(E1, 4), (E2, 0), (Epoch(65536 * 3), 1)], ids=["back", "leaves", "skips"])
def test_a_vnode_never_goes_back_and_leaves_an_epoch_only_at_its_end(epoch: Epoch, seq: int) -> None:
    progress = LogStoreVnodeProgress(8, {0: StoragePlace(E1, 5)})
    before = dict(progress.places())
    with pytest.raises(ProgressConflict, match="Vnode 0"):
        progress.apply_aligned(ALL, epoch, seq)
    assert dict(progress.places()) == before
    progress.apply_aligned(ALL, E1, 5)  # the same place again: two chunks without rows for the vnode
    progress.apply_aligned(ALL, E1)
    progress.apply_ended(VnodeBitmap.of([0], 8), E2)
    with pytest.raises(ProgressConflict, match="Vnode 0"):
        progress.apply_ended(VnodeBitmap.of([0, 1], 8), E1)
    with pytest.raises(ProgressConflict):
        progress.apply_aligned(ALL, E1)


def test_an_aligned_place_covers_all_that_moved_and_may_cover_more() -> None:
    progress = LogStoreVnodeProgress.aligned(EVEN, StoragePlace(E1))
    with pytest.raises(ProgressConflict, match="cover"):
        progress.apply_aligned(VnodeBitmap.of([0], 8), E2)
    progress.apply_aligned(ALL, E2)
    assert progress.bitmap() == ALL


def test_progress_survives_json() -> None:
    for progress in (
        LogStoreVnodeProgress(8),
        LogStoreVnodeProgress.aligned(EVEN, StoragePlace(E2)),
        LogStoreVnodeProgress(8, {0: StoragePlace(E1, 4), 1: StoragePlace(E2), 7: StoragePlace(E1, 4)}),
    ):
        assert LogStoreVnodeProgress.from_json(progress.to_json()) == progress
