"""Merge: what the nodes told, by the times of the commits, many transactions at once. Pure.

What a node told is put in *pieces*: rows, or one other event. Of the nodes' first pieces one ends first; it is told
whole, and of the others the transactions that committed before its end. So no node is ever half way in a transaction
but that one, and it goes on alone until that has ended. Commits of one node keep their order whatever their times say.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.sources.citus.numbers import Commits, commits_of, node_commits
from headwater.sources.events import Boundary, Changes, Event, Truncated
from headwater.sources.postgres.offset import PostgresOffset


@dataclass(slots=True)
class Piece:
    """Of what one node told.

    :ivar events: rows, or one other event; nothing where only the log went on.
    :ivar commits: of the rows.
    :ivar boundary: where the node is after it; ``None``: inside a transaction, perhaps.
    """

    events: Sequence[Event]
    commits: Commits
    boundary: Boundary | None = None

    def first(self, count: int) -> Piece:
        """Its first *count* commits, of more; the others stay here."""
        commits, self.commits = self.commits.divided(count)
        last = int(commits.lsns[-1])
        told, left = [], []
        for event in self.events:
            assert isinstance(event, Changes)
            end = int(np.searchsorted(node_commits(event), last, "right"))
            told += [_rows(event, 0, end)] if end else []
            left += [_rows(event, end, event.rows.num_rows)] if end < event.rows.num_rows else []
        self.events = left
        return Piece(told, commits, _after(last, int(commits.times[-1])))


class Merge:
    """What is merged at the moment."""

    def __init__(self) -> None:
        self._pieces: dict[int, deque[Piece]] = {}
        self._latest: dict[int, int] = {}
        self._half: int | None = None
        self._open: int | None = None

    def __contains__(self, group: int) -> bool:
        return bool(self._pieces.get(group))

    @property
    def is_half(self) -> bool:
        """Whether a node is inside a transaction, perhaps."""
        return self._half is not None

    def put(self, group: int, events: Sequence[Event]) -> None:
        """What a node told next; all that it told before was taken."""
        self._pieces[group] = deque(pieces_of(events, self._latest.get(group, 0)))
        self._latest[group] = max(self._latest.get(group, 0), *(_last(one.commits) for one in self._pieces[group]))

    def take(self) -> Mapping[int, Piece]:
        """What may be told next, by node; nothing where nothing is left.

        Call it when every node that has more to tell has told something.
        """
        if self._half is not None:
            return {self._half: self._rest(self._half)}
        first = {group: pieces[0] for group, pieces in self._pieces.items() if pieces}
        if not first:
            return {}
        ends = {group: _last(piece.commits) for group, piece in first.items()}
        ending = min(ends, key=ends.__getitem__)
        taken = {}
        for group, piece in first.items():
            count = int(np.searchsorted(piece.commits.times, ends[ending]))
            if group != ending and count:
                taken[group] = piece.first(count)
        taken[ending] = self._whole(ending)
        return taken

    def _whole(self, group: int) -> Piece:
        piece = self._pieces[group].popleft()
        if piece.boundary is not None:
            self._half = self._open = None
        elif len(piece.commits.lsns):
            self._half, self._open = group, int(piece.commits.lsns[-1])
        return piece

    def _rest(self, group: int) -> Piece:
        """Of the transaction that the node is inside of. It may have ended, which shows by the next one only."""
        piece = self._pieces[group][0]
        lsns = piece.commits.lsns
        if len(lsns) == 0 or (len(lsns) == 1 and lsns[0] == self._open):
            return self._whole(group)
        open_, self._half, self._open = self._open, None, None
        assert open_ is not None
        return piece.first(1) if lsns[0] == open_ else Piece([], commits_of([]), _after(open_, None))


def pieces_of(events: Sequence[Event], latest: int = 0) -> list[Piece]:
    """What a node told in one go. :param latest: the time of a commit before."""
    boundary = None
    if isinstance(events[-1], Boundary):
        boundary, events = events[-1], events[:-1]
    made: list[Piece] = []
    for are_rows, run in itertools.groupby(events, lambda event: isinstance(event, Changes)):
        if are_rows:
            rows = list(run)
            commits = commits_of([event for event in rows if isinstance(event, Changes)], latest)
            latest = _last(commits)
            made.append(Piece(rows, commits))
            continue
        for event in run:
            commits = _commit_of(event, latest)
            latest = max(latest, _last(commits))
            made.append(Piece([event], commits))
    made = made or [Piece([], commits_of([]))]
    made[-1].boundary = boundary
    return made


def _commit_of(event: Event, latest: int) -> Commits:
    """That a truncation is part of. Where columns change is part of none: it may be told again, and earlier."""
    if not isinstance(event, Truncated):
        return commits_of([])
    assert isinstance(event.position, PostgresOffset)
    time = max(event.commit_time_us or 0, latest)
    return Commits(np.array([event.position.commit_lsn], np.uint64), np.array([time], np.int64))


def _last(commits: Commits) -> int:
    return int(commits.times[-1]) if len(commits.times) else 0


def _after(commit: int, time: int | None) -> Boundary:
    """The place after a commit whose record's end is not known: the next one begins behind it, anyway."""
    return Boundary(PostgresOffset.end_of(commit, commit + 1, 0), time, 0)


def _rows(event: Changes, start: int, end: int) -> Changes:
    return Changes(event.table, event.rows.slice(start, end - start), event.ops.slice(start, end - start))
