"""What all handles and snapshots share: open until closed, and never used in a forked child."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from headwater.state.errors import StoreClosed
from headwater.stream.epoch import Epoch


class Closable:
    """Closed once, by hand or at the end of a ``with`` block."""

    def __init__(self) -> None:
        self._closed = False
        self._pid = os.getpid()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"This {type(self).__name__} is closed.", next_step="Open the store again.")
        if self._pid != os.getpid():
            raise StoreClosed(
                f"This {type(self).__name__} was opened in process {self._pid} and does not survive a fork.",
                next_step="Open the store again in this process.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Handle(Closable):
    """A handle on a store."""

    def __init__(self, location: str) -> None:
        super().__init__()
        self._location = location

    @property
    def location(self) -> str:
        return self._location

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._location}{' closed' if self._closed else ''}>"


class SnapshotBase(Closable):
    """A snapshot of one epoch."""

    def __init__(self, epoch: Epoch) -> None:
        super().__init__()
        self._epoch = epoch

    @property
    def epoch(self) -> Epoch:
        return self._epoch
