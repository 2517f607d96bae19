"""What others hear of a run: a snapshot that is read from the store, then news, in bounded memory.

A subscriber that does not take its news for long loses none of them: they are replaced by one `Reset`, and what they
said is read from the store.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass

from headwater.journal.entry import Entry, Head
from headwater.journal.errors import SegmentCutError
from headwater.journal.store import Store

WAITING = 1000
"""So many news wait for a subscriber."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The entries of a segment up to `head`, read when they are asked for, each time anew.

    Ends early when the segment was rewound meanwhile; a `Reset` is then among the news.
    """

    store: Store
    session: str
    segment: str
    head: Head

    def __iter__(self) -> Iterator[Entry]:
        try:
            yield from self.store.iter(self.session, self.segment, limit=self.head.seq)
        except SegmentCutError:
            return


@dataclass(frozen=True, slots=True)
class Reset:
    """Told to subscribers: forget what you have; these entries stand now."""

    entries: Snapshot


class Subscription:
    """Entries of the moment of subscribing, then everything after it, without gap or overlap."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._news: queue.SimpleQueue[Entry | Reset] = queue.SimpleQueue()

    def tell(self, news: Entry | Reset, now: Snapshot) -> None:
        """*now* is what stands, with *news*."""
        if isinstance(news, Reset) or self._news.qsize() >= WAITING:
            while self.take() is not None:
                pass
            news = Reset(now)
        self._news.put(news)

    def take(self, timeout: float = 0.0) -> Entry | Reset | None:
        """The next news; None when there is none within *timeout* seconds."""
        try:
            return self._news.get(timeout > 0, timeout or None)
        except queue.Empty:
            return None
