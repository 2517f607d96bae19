"""HeldEvents: the events of a change stream that came and were not told yet, in their order.

They wait until their transaction is whole, or until there are so many that a part of it has to be told.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from headwater.sources.mongodb.event_batches import EventBatches

MAX_ROWS: Final = 65_536
MAX_BYTES: Final = 32 << 20


class HeldEvents:
    """Those of one stream. Not for several threads.

    :ivar rows: how many there are.
    """

    def __init__(self) -> None:
        self._batches = EventBatches()
        self._queue: list[pa.RecordBatch] = []
        self._bytes = 0
        self.rows = 0

    @property
    def is_full(self) -> bool:
        """Whether no more should be taken."""
        return self.rows >= MAX_ROWS or self._bytes >= MAX_BYTES

    @property
    def newest_time(self) -> int:
        """The cluster time of the last one; 0 where there is none."""
        return int(self._queue[-1].column("cluster_time")[-1].as_py()) if self._queue else 0

    def take(self, documents: memoryview, after: int) -> bool:
        """Those of an answer, without what comes up to the cluster time *after*; whether there were any."""
        made = self._batches.decode(documents)
        times = made.column("cluster_time").to_numpy(zero_copy_only=False)
        if len(times) and times[0] <= after:
            made = made.slice(int(np.searchsorted(times, after, side="right")))
        if made.num_rows:
            self._queue.append(made)
            self.rows += made.num_rows
            self._bytes += len(documents)
        return bool(made.num_rows)

    def together(self) -> pa.RecordBatch:
        """All of them, of which there is one at least."""
        if len(self._queue) > 1:
            self._queue = pa.Table.from_batches(self._queue).combine_chunks().to_batches()
        assert len(self._queue) == 1
        return self._queue[0]

    def drop(self, count: int) -> None:
        """The first *count* of :meth:`together` were told."""
        batch = self.together()
        left = batch.num_rows - count
        self._queue = [batch.slice(count)] if left else []
        self._bytes = self._bytes * left // batch.num_rows
        self.rows = left
