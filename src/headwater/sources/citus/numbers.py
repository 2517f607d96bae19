"""CommitNumbers: gives each commit of each node its number in the merged log. Pure.

A number is the time of the commit in microseconds, or one more than the number before it, whichever is greater: it
grows with the merged log whatever the clocks of the nodes say, and tells about when.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.citus.offset import node_rows
from headwater.sources.events import Changes
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN


class CommitNumbers:
    """:ivar last: the greatest number that was given."""

    def __init__(self, last: int) -> None:
        self.last = last
        self._open: tuple[int, int] | None = None

    def of(self, group: int, told: Sequence[Changes]) -> list[NDArray[np.uint64]]:
        """For the rows of each of *told*, all of one node and in its order: the numbers of their commits.

        The last commit may go on with the next call: it keeps its number then.
        """
        if not told:
            return []
        commits = [node_rows(one.rows.column(POSITION_COLUMN))["commit_lsn"].astype(np.uint64) for one in told]
        times = [_microseconds(one.rows.column(COMMIT_TIMESTAMP_COLUMN)) for one in told]
        distinct, first = np.unique(np.concatenate(commits), return_index=True)
        numbers = self._given((group, int(distinct[0])), np.concatenate(times)[first])
        self._open = (group, int(distinct[-1]))
        self.last = int(numbers[-1])
        return [numbers[np.searchsorted(distinct, some)] for some in commits]

    def _given(self, first: tuple[int, int], times: NDArray[np.int64]) -> NDArray[np.uint64]:
        counted = np.arange(len(times), dtype=np.int64)
        least = self.last + (first != self._open)
        wanted = times - counted
        if first == self._open:
            wanted[0] = least
        numbers: NDArray[np.int64] = np.maximum.accumulate(np.maximum(wanted, least)) + counted
        return numbers.astype(np.uint64)


def _microseconds(times: pa.TimestampArray) -> NDArray[np.int64]:
    values: NDArray[np.int64] = times.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return values
