"""The stream over an upstream table: its phases, and vnodes that stand at different epochs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.backfill.upstream_model import Downstream, MemoryUpstream, epoch, position, vnode_of

from headwater.backfill.snapshot.consume_upstream.errors import (
    ChangeLogGone,
    EpochGap,
    EpochMismatch,
    InvalidUpstream,
    KeyNotUnique,
    RetentionMiss,
    UpstreamDropped,
    UpstreamUnreadable,
    VersionExpired,
)
from headwater.backfill.snapshot.consume_upstream.stream import StreamPhase, UpstreamStream
from headwater.backfill.snapshot.consume_upstream.upstream_table import Part, PartKind
from headwater.backfill.snapshot.state import BackfillState, VnodeProgress
from headwater.state import Catalog, StateTable, WriteBatch, open_writer
from headwater.stream import VnodeBitmap

ALL = 1 << 60


@pytest.fixture
def states() -> Iterator[StateTable]:
    with open_writer("memory://upstream-stream") as store, store.snapshot() as view:
        yield BackfillState.open_table(Catalog.load(view), WriteBatch())


@pytest.fixture
def upstream() -> MemoryUpstream:
    made = MemoryUpstream()
    made.commit({key: 10 * key for key in range(20)}, 10)
    return made


class Stream:
    """A stream, its state, and what came of it."""

    def __init__(
        self, states: StateTable, upstream: MemoryUpstream, rows: dict[int, VnodeProgress] | None = None
    ) -> None:
        self.upstream = upstream
        self.state = BackfillState(states, upstream.name, VnodeBitmap.full(upstream.vnode_count), rows)
        self.stream = UpstreamStream(upstream, epoch(10), self.state)
        self.downstream = Downstream()

    def take(self, rows: int = ALL) -> list[Part]:
        parts = self.stream.take(rows)
        for part in parts:
            self.downstream.read(self.upstream, part)
        return parts

    @property
    def rows(self) -> dict[int, VnodeProgress]:
        return {vnode: row for vnode, row in self.state.items() if row is not None}

    @property
    def phase(self) -> StreamPhase:
        return self.stream.phase

    def drain(self) -> None:
        while self.take():
            pass


def test_the_phases_follow_each_other(states: StateTable, upstream: MemoryUpstream) -> None:
    made = Stream(states, upstream)
    seen = [made.phase]
    for rows in (3, ALL, ALL):
        made.take(rows)
        seen.append(made.phase)
    upstream.commit({1: 11, 2: None, 30: 300})
    assert {part.kind for part in made.take()} == {PartKind.CHANGES}
    seen.append(made.phase)
    assert made.take() == []
    seen.append(made.phase)
    assert seen == [
        StreamPhase.CREATING_SNAPSHOT,
        StreamPhase.CONSUMING_SNAPSHOT,
        StreamPhase.CONSUMING_SNAPSHOT,
        StreamPhase.RESOLVING_NEXT_EPOCH,
        StreamPhase.CONSUMING_CHANGE_LOG,
        StreamPhase.RESOLVING_NEXT_EPOCH,
    ]
    assert made.downstream.rows == upstream.versions[upstream.newest_epoch()]


def test_a_snapshot_goes_on_at_the_next_key_of_each_vnode(states: StateTable, upstream: MemoryUpstream) -> None:
    made = Stream(states, upstream)
    made.take(5)
    assert 0 < len(made.downstream.rows) < 20
    again = Stream(states, upstream, made.rows)
    again.downstream = made.downstream
    again.drain()
    assert again.downstream.rows == upstream.versions[epoch(10)]


def test_a_snapshot_that_is_cut_otherwise_meanwhile_goes_on_at_the_same_key(
    states: StateTable, upstream: MemoryUpstream
) -> None:
    made = Stream(states, upstream)
    upstream.hold("it", epoch(10))
    while made.take(1) and not made.state.has_finished(epoch(10)):
        upstream.compact()
    assert made.downstream.rows == upstream.versions[epoch(10)]


def test_a_piece_that_no_longer_fits_is_left_for_the_next_time(states: StateTable, upstream: MemoryUpstream) -> None:
    made = Stream(states, upstream)
    taken = []
    while parts := made.take(5):
        taken.append(sum(part.rows for part in parts))
    assert sum(taken) == 20
    assert max(taken) <= 5


def test_whole_vnodes_side_by_side_are_one_part(states: StateTable, upstream: MemoryUpstream) -> None:
    (part,) = Stream(states, upstream).take()
    assert part.vnodes == (0, upstream.vnode_count)
    assert part.rows == 20


def test_a_part_survives_as_json(states: StateTable, upstream: MemoryUpstream) -> None:
    for part in Stream(states, upstream).take(3):
        assert Part.from_json(part.to_json()) == part


def test_m3_vnodes_at_three_epochs_advance_alone_until_they_meet(states: StateTable, upstream: MemoryUpstream) -> None:
    """M3 across databases: after a rescale an owner has vnodes of owners that were behind and ahead."""
    for number in (20, 30, 40):
        upstream.commit({key: 10 * key + number for key in range(number // 10, 20, 3)}, number)
    count = upstream.vnode_count
    stands = {vnode: epoch((20, 30, 40)[vnode % 3]) for vnode in range(count)}
    made = Stream(states, upstream, {vnode: VnodeProgress(at, 1) for vnode, at in stands.items()})
    made.downstream.rows = {
        key: upstream.versions[stands[vnode_of(key, count)]][key]
        for key in range(20)
        if key in upstream.versions[stands[vnode_of(key, count)]]
    }
    steps = []
    while parts := made.take():
        steps.append({(part.after, part.epoch) for part in parts})
        taken = {vnode for part in parts for vnode in range(*part.vnodes)}
        assert taken == {vnode for vnode, at in stands.items() if at == min(stands.values())}
        stands |= dict.fromkeys(taken, parts[0].epoch)
    assert steps == [{(epoch(20), epoch(30))}, {(epoch(30), epoch(40))}]
    assert made.downstream.rows == upstream.versions[epoch(40)]


def test_m3_a_vnode_in_the_middle_of_an_epoch_goes_on_there_while_others_wait(
    states: StateTable, upstream: MemoryUpstream
) -> None:
    upstream.commit(dict.fromkeys(range(20), 7), 20)
    made = Stream(states, upstream)
    made.take()
    while all(row is not None and row.is_finished for _, row in made.state.items()):
        assert made.take(1)
    upstream.commit(dict.fromkeys(range(0, 20, 2), 8), 30)
    again = Stream(states, upstream, made.rows)
    again.downstream = made.downstream
    again.drain()
    assert again.downstream.rows == upstream.versions[epoch(30)]
    assert again.state.has_finished(epoch(30))


def test_a_vnode_ahead_of_an_epoch_that_the_table_has_not_is_a_gap(
    states: StateTable, upstream: MemoryUpstream
) -> None:
    upstream.commit({1: 1}, 20)
    rows = {vnode: VnodeProgress(epoch(10), 1) for vnode in range(8)} | {3: VnodeProgress(epoch(15), 1)}
    made = Stream(states, upstream, rows)
    with pytest.raises(EpochGap):
        made.take()
    assert made.stream.phase is StreamPhase.FAILED
    assert made.stream.take(ALL) == []


def test_a_vnode_before_the_snapshot_is_refused(states: StateTable, upstream: MemoryUpstream) -> None:
    with pytest.raises(EpochGap):
        Stream(states, upstream, {0: VnodeProgress(epoch(5), 1)})


def test_s8_what_is_no_longer_kept_stops_and_everything_else_is_an_error(
    states: StateTable, upstream: MemoryUpstream
) -> None:
    """S8: retention miss, expired version and epoch mismatch stop; a dropped table and other errors do not."""
    for error in (ChangeLogGone, VersionExpired, EpochMismatch):
        assert issubclass(error, RetentionMiss)
    for other in (UpstreamDropped, UpstreamUnreadable, KeyNotUnique, InvalidUpstream, EpochGap):
        assert not issubclass(other, RetentionMiss)
    behind = Stream(states, upstream)
    behind.take()
    upstream.commit({1: 5}, 20)
    upstream.commit({1: 6}, 30)
    upstream.compact(epoch(30))
    assert behind.take() == []
    assert behind.stream.phase is StreamPhase.STOPPED
    assert isinstance(behind.stream.stopped, ChangeLogGone)
    assert behind.take() == []
    expired = Stream(states, upstream)
    assert expired.take() == []
    assert isinstance(expired.stream.stopped, VersionExpired)


def test_s8_a_dropped_table_is_an_error(states: StateTable, upstream: MemoryUpstream) -> None:
    made = Stream(states, upstream)
    made.take()
    upstream.dropped = True
    with pytest.raises(UpstreamDropped):
        made.take()
    assert made.stream.phase is StreamPhase.FAILED


def test_a_vnode_without_rows_and_an_empty_table_are_consumed(states: StateTable) -> None:
    """M8."""
    upstream = MemoryUpstream(versions={epoch(10): {}})
    made = Stream(states, upstream)
    made.take()
    assert made.state.has_finished(epoch(10))
    upstream.commit({1: 1}, 20)
    made.drain()
    assert made.downstream.rows == {1: 1}


def test_positions_sort_as_keys_do() -> None:
    assert sorted([position(3), position(-1), position(2)]) == [position(-1), position(2), position(3)]
