"""VnodeStream: the vnodes of one version of a table, read side by side and given as chunks.

Rows of a vnode come in key order; between vnodes there is no order. A few vnodes are open at a time, and each holds at
most two batches, so memory does not grow with the number of vnodes. An update pair is never parted: a chunk is closed
early instead. A read that has been open for long is opened anew where it stands, so that it does not hold an old
version of the table.

Threads read, one caller takes. All waiting is on one condition that every step of a reader notifies: a caller that
looks at the next key of a vnode takes no wake-up away from one that waits for rows. With ``readers=0`` the caller reads
itself, one step at a time in a fixed order: the same calls give the same chunks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from headwater.backfill.snapshot.errors import InvalidSnapshotOption
from headwater.backfill.snapshot.state import VnodeProgress
from headwater.stream import OP_COLUMN, VNODE_COLUMN, Chunk, Op

LEAST_CHUNK_ROWS: Final = 2
"""An update pair must fit."""
_CLOSE_SECONDS: Final = 5.0
"""How long the end of a read is waited for; a thread that hangs in one ends with the process."""


class VnodeSource(Protocol):
    """Where the rows of vnodes come from: one version of a table, or its change log of one epoch."""

    def open(self, vnode: int, start: bytes | None) -> Iterator[pa.RecordBatch]:
        """The rows of *vnode* in key order from *start* on, inclusive; with an ``_op`` column, or all inserts."""
        ...

    def position(self, batch: pa.RecordBatch, row: int) -> bytes:
        """The key of a row, memcomparable."""
        ...


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How vnodes are read.

    :ivar chunk_rows: of a chunk, at most. :ivar readers: threads; 0: the caller reads.
    :ivar open_vnodes: so many are read at a time. :ivar rebuild_seconds: after so long a read is opened anew.
    :raises InvalidSnapshotOption: a number that makes no sense.
    """

    chunk_rows: int = 16_384
    readers: int = 2
    open_vnodes: int = 8
    rebuild_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.chunk_rows < 1 or self.readers < 0 or self.open_vnodes < 1 or self.rebuild_seconds <= 0:
            raise InvalidSnapshotOption(
                "Received a number that makes no sense for the reading of vnodes.",
                next_step="Use chunk_rows and open_vnodes from 1, readers from 0, rebuild_seconds above 0.",
            )


@dataclass(slots=True, eq=False)
class _Vnode:
    """One vnode while it is read."""

    number: int
    start: bytes | None
    row_count: int
    rows: Iterator[pa.RecordBatch] | None = None
    opened_at: float = 0.0
    reopens_after: bytes | None = None
    batches: deque[pa.RecordBatch] = field(default_factory=deque)
    is_reading: bool = False
    is_ended: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_ended and not self.batches

    @property
    def is_begun(self) -> bool:
        return self.opened_at > 0.0 or self.is_ended

    @property
    def wants(self) -> bool:
        return not self.is_ended and not self.is_reading and len(self.batches) < 2


class VnodeStream:
    """Reads the *vnodes* of *source*.

    :param vnodes: by vnode: where it goes on (its progress in this epoch), or ``None``: from its beginning. A vnode
        that has finished the epoch gives nothing.
    :param epoch: that is read; it is what :meth:`progress` tells.
    """

    def __init__(
        self,
        source: VnodeSource,
        epoch: int,
        vnodes: Mapping[int, VnodeProgress | None],
        options: StreamOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self.epoch, self._clock = source, epoch, clock
        self.options = options or StreamOptions()
        self._chunk_rows = max(self.options.chunk_rows, LEAST_CHUNK_ROWS)
        self._finished = {number: row for number, row in vnodes.items() if row is not None and row.is_finished}
        self._vnodes = [
            _Vnode(number, None, 0) if row is None else _Vnode(number, row.position, row.row_count)
            for number, row in sorted(vnodes.items())
            if number not in self._finished
        ]
        self._waiting = deque(self._vnodes)
        self._open: list[_Vnode] = []
        self._ready: deque[_Vnode] = deque()
        self._parts: list[tuple[int, pa.RecordBatch]] = []
        self._part_rows = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, name=f"vnode-stream-{number}", daemon=True)
            for number in range(min(self.options.readers, len(self._vnodes)))
        ]
        for thread in self._threads:
            thread.start()

    # -- taking ----------------------------------------------------------------------------------------------------

    def set_chunk_rows(self, rows: int) -> None:
        """Another size from the next chunk on."""
        self._chunk_rows = max(rows, LEAST_CHUNK_ROWS)

    def next_chunk(self, timeout: float | None = None) -> Chunk | None:
        """A full chunk; ``None`` when it is not full after *timeout* seconds, or when there are no more rows.

        What was gathered stays, for the next call or for :meth:`flush`. What a read raised is raised here.
        """
        deadline = None if timeout is None else self._clock() + timeout
        with self._changed:
            while True:
                while self._ready:
                    if self._gather():
                        return self._cut()
                self._raise()
                if self.is_exhausted or not self._wait(deadline):
                    return None

    def flush(self) -> Chunk | None:
        """What was gathered and is not full."""
        with self._changed:
            return self._cut() if self._part_rows else None

    @property
    def is_exhausted(self) -> bool:
        """Whether every row was gathered; the last of them may wait for :meth:`flush`."""
        return all(vnode.is_over for vnode in self._vnodes)

    def progress(self, timeout: float | None = None) -> dict[int, VnodeProgress] | None:
        """For every vnode that was begun: how far it is after all that was gathered. Flush first.

        The next key is looked at, so this waits for reads that are under way; ``None``: not within *timeout*. What a
        read raised is raised here, too.
        """
        deadline = None if timeout is None else self._clock() + timeout
        with self._changed:
            while True:
                self._raise()
                if all(vnode.batches or vnode.is_ended for vnode in self._open):
                    return self._finished | {
                        vnode.number: VnodeProgress(self.epoch, vnode.row_count, self._next_key(vnode))
                        for vnode in self._vnodes
                        if vnode.is_begun or vnode.start is not None
                    }
                if not self._wait(deadline):
                    return None

    def _next_key(self, vnode: _Vnode) -> bytes | None:
        if vnode.batches:
            return self._source.position(vnode.batches[0], 0)
        return vnode.start if not vnode.is_begun else None

    def _gather(self) -> bool:
        """Take rows of the vnode that was ready first; whether the chunk is full."""
        vnode = self._ready[0]
        batch = vnode.batches[0]
        free = self._chunk_rows - self._part_rows
        taken = batch.num_rows if batch.num_rows <= free else _whole_rows(batch, free)
        if taken:
            self._parts.append((vnode.number, batch.slice(0, taken)))
            self._part_rows += taken
            vnode.row_count += taken
        if taken == batch.num_rows:
            vnode.batches.popleft()
            self._ready.popleft()
            if vnode.batches:
                self._ready.append(vnode)
            self._changed.notify_all()
        else:
            vnode.batches[0] = batch.slice(taken)
        return self._part_rows == self._chunk_rows or taken < batch.num_rows

    def _cut(self) -> Chunk:
        numbers = [number for number, _ in self._parts]
        vnodes = np.repeat(np.array(numbers, np.uint16), [batch.num_rows for _, batch in self._parts])
        rows = pa.Table.from_batches([batch for _, batch in self._parts]).combine_chunks().to_batches()[0]
        self._parts, self._part_rows = [], 0
        names = rows.schema.names
        ops = rows.column(OP_COLUMN) if OP_COLUMN in names else pa.array(np.full(len(vnodes), Op.INSERT), pa.int8())
        return Chunk(
            rows.select([name for name in names if name not in (OP_COLUMN, VNODE_COLUMN)]),
            ops,
            pa.array(vnodes, pa.uint16()),
        )

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait(self, deadline: float | None) -> bool:
        """Until something has changed; ``False``: the time is over."""
        if not self.options.readers:
            vnode = self._choose()
            if vnode is None:
                return False
            self._step(vnode)
            return True
        left = None if deadline is None else deadline - self._clock()
        if left is not None and left <= 0:
            return False
        self._changed.wait(left)
        return True

    # -- reading ---------------------------------------------------------------------------------------------------

    def _choose(self) -> _Vnode | None:
        """The vnode whose next batch is wanted most: one that has none first, in their order."""
        self._open = [vnode for vnode in self._open if not vnode.is_over]
        while self._waiting and len(self._open) < self.options.open_vnodes:
            self._open.append(self._waiting.popleft())
        wanted = [vnode for vnode in self._open if vnode.wants]
        return min(wanted, key=lambda vnode: len(vnode.batches)) if wanted else None

    def _read(self) -> None:
        """What each thread does."""
        with self._changed:
            while not self._is_closed and self._error is None:
                vnode = self._choose()
                if vnode is not None:
                    self._step(vnode)
                elif self._waiting or any(not vnode.is_ended for vnode in self._open):
                    self._changed.wait()
                else:
                    return

    def _step(self, vnode: _Vnode) -> None:
        """Read one batch of *vnode*; the condition is held on entry and on return, not in between."""
        vnode.is_reading = True
        self._changed.release()
        batch: pa.RecordBatch | None = None
        error: BaseException | None = None
        try:
            batch = self._next_batch(vnode)
        except BaseException as raised:  # whoever takes must know; a thread that dies in silence would hang it
            error = raised
        finally:
            self._changed.acquire()
            vnode.is_reading = False
            if error is not None:
                self._error = self._error or error
            elif batch is None:
                vnode.is_ended = True
            else:
                vnode.batches.append(batch)
                if vnode not in self._ready:
                    self._ready.append(vnode)
            self._changed.notify_all()

    def _next_batch(self, vnode: _Vnode) -> pa.RecordBatch | None:
        if vnode.rows is None:
            after = vnode.reopens_after
            vnode.rows = iter(self._source.open(vnode.number, vnode.start if after is None else after))
            vnode.opened_at = max(self._clock(), 1e-9)
        for batch in vnode.rows:
            if vnode.reopens_after is not None:
                batch = self._without(batch, vnode.reopens_after)
                vnode.reopens_after = None
            if not batch.num_rows:
                continue
            if self._clock() - vnode.opened_at >= self.options.rebuild_seconds:
                vnode.reopens_after = self._source.position(batch, batch.num_rows - 1)
                self._let_go(vnode)
            return batch
        self._let_go(vnode)
        return None

    def _without(self, batch: pa.RecordBatch, key: bytes) -> pa.RecordBatch:
        """*batch* without its first record, if that is *key*'s: it was given before the read was opened anew."""
        passed = 0
        while passed < min(2, batch.num_rows) and self._source.position(batch, passed) == key:
            passed += 1
        return batch.slice(passed)

    @staticmethod
    def _let_go(vnode: _Vnode) -> None:
        close = getattr(vnode.rows, "close", None)
        vnode.rows = None
        if close is not None:
            close()

    def close(self) -> None:
        """End all reads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        for vnode in self._vnodes:
            if not vnode.is_reading:
                self._let_go(vnode)

    def __enter__(self) -> VnodeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole_rows(batch: pa.RecordBatch, rows: int) -> int:
    """At most *rows*, and no half of an update pair."""
    place = batch.schema.get_field_index(OP_COLUMN)
    if place < 0 or rows == 0:
        return rows
    return rows - 1 if batch.column(place)[rows - 1].as_py() == Op.UPDATE_DELETE else rows
