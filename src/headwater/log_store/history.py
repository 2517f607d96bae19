"""The history of a log: epochs that were sealed before a writer began, without the rows that are done."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.log_store.columns import SEQ, VNODE, chunk_of
from headwater.log_store.item import BarrierItem, ChunkItem, Done, LogItem, last_seqs
from headwater.log_store.log_view import EpochEnd, LogView
from headwater.log_store.offset import LogOffset, StoragePlace
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.log_store.state import LogStoreState
from headwater.state import StateReader
from headwater.stream import Chunk, Epoch, VnodeBitmap

HISTORY_ROWS = 8192
"""Rows of a chunk that is read from history, at most (one more when an update pair would be split)."""

HISTORY_VIEW_SECONDS = 60.0
"""After this long history is read on from a new snapshot: an old one holds back the reuse of space."""

_WHOLE = 1 << 33


def history_start(progress: LogStoreVnodeProgress, vnodes: VnodeBitmap) -> Epoch:
    """The epoch after which the history of *vnodes* begins."""
    least = progress.minimum(vnodes)
    if least is None:
        return Epoch(0)
    return least.epoch if least.seq is None else least.epoch.prev()


def steps_to_end(progress: LogStoreVnodeProgress, vnodes: VnodeBitmap, epoch: Epoch) -> list[Done]:
    """What takes the *vnodes* that are behind to the end of *epoch*: out of the epochs they are in first."""
    found = {vnode: place for vnode, place in progress.places() if vnode in vnodes}
    behind = [v for v in vnodes if v not in found or found[v] < StoragePlace(epoch)]
    inside = {v: found[v].epoch for v in behind if v in found and found[v].seq is not None}
    left = [
        Done(at, VnodeBitmap.of([v for v, place in inside.items() if place == at], vnodes.count), None)
        for at in sorted(set(inside.values()))
    ]
    return [*left, Done(epoch, VnodeBitmap.of(behind, vnodes.count), None)]


def read_history(
    store: StateReader,
    state: LogStoreState,
    vnodes: VnodeBitmap,
    progress: LogStoreVnodeProgress,
    before: Epoch,
    *,
    consumer: str,
    read_before: LogOffset | None = None,
    rows: int = HISTORY_ROWS,
    view_seconds: float = HISTORY_VIEW_SECONDS,
) -> Iterator[tuple[LogItem, Done]]:
    """Items of the sealed epochs before epoch *before*, each with what it says of the vnodes once it is done.

    :param read_before: the newest offset that was handed out or truncated already: chunk ids go on after it.
    :param rows: of one chunk, at most.
    :raises RetentionMiss: retention dropped epochs that *consumer* has not read.
    """
    reading = _History(vnodes, *_place_arrays(progress), read_before, rows)
    after, last = history_start(progress, vnodes), before.prev()
    while after < last:
        with store.snapshot() as view:
            until = time.monotonic() + view_seconds
            log = LogView(view, state.log, state.counters.persistent_log)
            log.check_not_dropped(after, consumer)
            for end in log.epochs(after, last):
                yield from reading.epoch(log, end)
                after = end.epoch
                if time.monotonic() >= until:
                    break
            else:
                return


class _History:
    """One reading of history.

    :param epochs: per vnode the epoch that is done, with *seqs* how far.
    """

    def __init__(
        self,
        vnodes: VnodeBitmap,
        epochs: NDArray[np.uint64],
        seqs: NDArray[np.int64],
        read_before: LogOffset | None,
        rows: int,
    ) -> None:
        self._vnodes = vnodes
        self._epochs = epochs
        self._seqs = seqs
        self._read_before = read_before
        self._rows = rows

    def epoch(self, log: LogView, end: EpochEnd) -> Iterator[tuple[LogItem, Done]]:
        """The items of one epoch."""
        epochs, seqs = self._epochs, self._seqs
        chunk_id = self._first_chunk_id(end.epoch)
        for batch in log.batches(end.epoch, end.ended, end.vnodes & self._vnodes):
            vnodes = batch.column(VNODE).to_numpy()
            number = batch.column(SEQ).to_numpy()
            fresh = (epochs[vnodes] < end.epoch) | ((epochs[vnodes] == end.epoch) & (seqs[vnodes] < number))
            if not fresh.all():
                batch = batch.filter(pa.array(fresh))
            for item, done in self._pieces(end.epoch, batch):
                yield ChunkItem(end.epoch, chunk_id, item), done
                chunk_id += 1
        # The epoch is over for all vnodes, also for those whose owner wrote no barrier because it was paused.
        open_here = (epochs < end.epoch) | ((epochs == end.epoch) & (seqs < _WHOLE))
        ended = VnodeBitmap.from_mask(open_here) & self._vnodes
        yield BarrierItem(end.epoch, end.is_checkpoint), Done(end.epoch, ended, None)

    def _first_chunk_id(self, epoch: Epoch) -> int:
        """Ids go on where an epoch was left: an offset never stands for two chunks."""
        place = self._read_before
        return 0 if place is None or place.epoch != epoch or place.chunk_id is None else place.chunk_id + 1

    def _pieces(self, epoch: Epoch, batch: pa.RecordBatch) -> Iterator[tuple[Chunk, Done]]:
        place = 0
        whole = chunk_of(batch)
        for chunk in whole.split(max_rows=self._rows) if batch.num_rows else []:
            part = batch.slice(place, chunk.num_rows)
            seqs = last_seqs(part.column(VNODE).to_numpy(), part.column(SEQ).to_numpy())
            yield chunk, Done(epoch, self._vnodes, seqs)
            place += chunk.num_rows


def _place_arrays(progress: LogStoreVnodeProgress) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Per vnode the epoch and seq that are done; a whole epoch counts as a seq beyond all."""
    epochs = np.zeros(progress.vnode_count, np.uint64)
    seqs = np.full(progress.vnode_count, _WHOLE, np.int64)
    for vnode, place in progress.places():
        epochs[vnode] = place.epoch
        seqs[vnode] = _WHOLE if place.seq is None else place.seq
    return epochs, seqs
