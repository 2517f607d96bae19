"""CommitNumbers: gives each commit of each node its number in the merged log. Pure.

A number is the time of the commit in microseconds, or one more than the number before it, whichever is greater: it
grows with the merged log whatever the clocks of the nodes say, and tells about when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.events import Changes
from headwater.sources.offset import position_rows
from headwater.sources.postgres.offset import POSITION_DTYPE
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN


@dataclass(frozen=True, slots=True)
class Commits:
    """Some of one node, in its order.

    :ivar times: in microseconds; a commit is as late as the latest before it at least.
    """

    lsns: NDArray[np.uint64]
    times: NDArray[np.int64]

    def divided(self, count: int) -> tuple[Commits, Commits]:
        """The first *count*, and the others."""
        return Commits(self.lsns[:count], self.times[:count]), Commits(self.lsns[count:], self.times[count:])


class CommitNumbers:
    """:ivar last: the greatest number that was given."""

    def __init__(self, last: int) -> None:
        self.last = last
        self._open: tuple[int, int] | None = None

    def of(self, told: Mapping[int, Commits]) -> dict[int, NDArray[np.uint64]]:
        """The numbers of the commits of each node, in the order of their times.

        The last commit may go on with the next call: it keeps its number then, and comes first.
        """
        some = {group: commits for group, commits in told.items() if len(commits.lsns)}
        if not some:
            return {group: np.zeros(0, np.uint64) for group in told}
        groups = np.concatenate([np.full(len(commits.lsns), group) for group, commits in some.items()])
        lsns = np.concatenate([commits.lsns for commits in some.values()])
        times = np.concatenate([commits.times for commits in some.values()])
        order = np.argsort(times, kind="stable")
        first, last = order[0], order[-1]
        numbers = np.empty(len(order), np.uint64)
        numbers[order] = self._given((int(groups[first]), int(lsns[first])), times[order])
        self._open = int(groups[last]), int(lsns[last])
        self.last = int(numbers[last])
        return {group: numbers[groups == group] for group in told}

    def _given(self, first: tuple[int, int], times: NDArray[np.int64]) -> NDArray[np.uint64]:
        counted = np.arange(len(times), dtype=np.int64)
        least = self.last + (first != self._open)
        wanted = times - counted
        if first == self._open:
            wanted[0] = least
        numbers: NDArray[np.int64] = np.maximum.accumulate(np.maximum(wanted, least)) + counted
        return numbers.astype(np.uint64)


def commits_of(told: Sequence[Changes], latest: int = 0) -> Commits:
    """Of the rows of one node, which come in its order. :param latest: the time of a commit before them."""
    if not told:
        return Commits(np.zeros(0, np.uint64), np.zeros(0, np.int64))
    times = np.concatenate([_microseconds(one.rows.column(COMMIT_TIMESTAMP_COLUMN)) for one in told])
    lsns, first = np.unique(np.concatenate([node_commits(one) for one in told]), return_index=True)
    return Commits(lsns, np.maximum.accumulate(np.maximum(times[first], latest)))


def node_commits(told: Changes) -> NDArray[np.uint64]:
    """Of each row, the place of its commit in the log of its node."""
    found: NDArray[np.uint64] = position_rows(told.rows.column(POSITION_COLUMN), POSITION_DTYPE)["commit_lsn"].astype(
        np.uint64
    )
    return found


def _microseconds(times: pa.TimestampArray) -> NDArray[np.int64]:
    values: NDArray[np.int64] = times.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return values
