"""HeldSnapshot: the snapshot that the tasks of the newest plan read in, and how fast they read."""

from __future__ import annotations

import time

from headwater.sources.snapshots import ExportedSnapshot


class HeldSnapshot:
    """One snapshot at a time, from the planning of a batch to the planning of the next; one thread."""

    def __init__(self) -> None:
        self.snapshot: ExportedSnapshot | None = None
        self._plan = 0
        self._handed: tuple[int, float] | None = None
        self._rate: float | None = None

    def hold(self, snapshot: ExportedSnapshot | None, plan: int, rows: int) -> None:
        """Keep *snapshot* open, if the plan has one: *plan* reads about *rows* rows."""
        self.snapshot, self._plan = snapshot, plan
        self._handed = (rows, time.monotonic())

    def of(self, plan: int, *, ask: bool) -> ExportedSnapshot | None:
        """That of *plan*; ``None``: it is gone. :param ask: the server whether it still has it."""
        found = self.snapshot
        if found is None or self._plan != plan or (ask and not found.is_open()):
            return None
        return found

    def rows_in(self, seconds: float) -> int:
        """How many rows were read in so long a time, as the last plans went; 0: nobody knows."""
        return 0 if self._rate is None else int(self._rate * seconds)

    def let_go(self) -> None:
        """The batch is over: its snapshot may end."""
        if self.snapshot is not None:
            self.snapshot.close()
            self.snapshot = None
        if self._handed is not None:
            rows, since = self._handed
            self._handed = None
            if rows:  # the first batch has the start of the tasks in it: it tells too few, and the next puts it right
                rate = rows / max(time.monotonic() - since, 0.01)
                self._rate = rate if self._rate is None or rate > self._rate else (self._rate + rate) / 2
