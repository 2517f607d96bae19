"""The order of messages: the transition table of the module, row by row."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.stream import (
    INVALID,
    Barrier,
    BarrierKind,
    Chunk,
    Epoch,
    EpochPair,
    Message,
    MessageOrderError,
    Mutation,
    Pause,
    Stop,
    StreamPhase,
    StreamState,
    with_epochs,
)

CHUNK = Chunk.inserts(pa.record_batch({"id": [1]}), ["id"])


def barrier(prev: int, kind: BarrierKind = BarrierKind.BARRIER, mutation: Mutation | None = None) -> Barrier:
    return Barrier(EpochPair(curr=Epoch.from_ms(prev + 1), prev=Epoch.from_ms(prev)), kind, mutation)


WAITING = StreamState()
RUNNING = WAITING.after(barrier(0, BarrierKind.INITIAL))
STOPPED = RUNNING.after(barrier(1, BarrierKind.CHECKPOINT, Stop()))


def test_a_stream_begins_with_an_initial_barrier() -> None:
    assert WAITING.epoch is INVALID
    assert StreamState(StreamPhase.RUNNING, EpochPair(curr=Epoch.from_ms(1), prev=INVALID)) == RUNNING
    with pytest.raises(MessageOrderError, match="chunk before the first barrier"):
        WAITING.after(CHUNK)
    for kind in (BarrierKind.BARRIER, BarrierKind.CHECKPOINT, BarrierKind.SYNC_CHECKPOINT):
        with pytest.raises(MessageOrderError, match="while the stream is waiting"):
            WAITING.after(barrier(1, kind))


def test_chunks_belong_to_the_open_epoch() -> None:
    assert RUNNING.after(CHUNK).after(CHUNK) == RUNNING
    assert RUNNING.epoch == Epoch.from_ms(1)


def test_barriers_chain() -> None:
    for kind in (BarrierKind.BARRIER, BarrierKind.CHECKPOINT, BarrierKind.SYNC_CHECKPOINT):
        assert RUNNING.after(barrier(1, kind, Pause())).epoch == Epoch.from_ms(2)
    for prev in (0 + 2, 7):
        with pytest.raises(MessageOrderError, match="the open epoch is 65536"):
            RUNNING.after(barrier(prev))
    with pytest.raises(MessageOrderError, match="'initial' while the stream is running"):
        RUNNING.after(barrier(1, BarrierKind.INITIAL))


def test_a_stop_for_all_ends_the_stream() -> None:
    assert STOPPED.phase is StreamPhase.STOPPED
    assert RUNNING.after(barrier(1, BarrierKind.CHECKPOINT, Stop(("one",)))).phase is StreamPhase.RUNNING
    for message in (CHUNK, barrier(2), barrier(2, BarrierKind.INITIAL)):
        with pytest.raises(MessageOrderError, match="after the stop"):
            STOPPED.after(message)


def test_each_message_comes_with_its_epoch() -> None:
    messages: list[Message] = [barrier(0, BarrierKind.INITIAL), CHUNK, barrier(1), CHUNK, CHUNK, barrier(2)]
    assert [epoch.ms for epoch, _ in with_epochs(messages)] == [0, 1, 1, 2, 2, 2]
    running = StreamState(StreamPhase.RUNNING, barrier(1).epoch)
    assert [epoch.ms for epoch, _ in with_epochs(messages[3:], running)] == [2, 2, 2]
    with pytest.raises(MessageOrderError):
        list(with_epochs([*messages, barrier(5)]))
