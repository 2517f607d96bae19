"""A view of one epoch on an object store, over anything of SlateDB's that can get and scan."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from headwater.state.batch import check_bounds, prefix_end
from headwater.state.engines.large_values import groups, read_values
from headwater.state.engines.slate import Place, map_errors, run, slate
from headwater.state.errors import StoreClosed, StoreUnavailable
from headwater.state.handle import SnapshotBase
from headwater.stream.epoch import Epoch

SNAPSHOT_SECONDS = 3000.0
"""How long a snapshot of the newest epoch stays valid: after that what it reads may be dropped."""

DATA = b"d"
COMMITTED = b"m/committed"

_SCAN_CELLS = 1000


class ObjectSnapshot(SnapshotBase):
    """A view of one epoch."""

    def __init__(
        self, place: Place, view: Any, value: Callable[[bytes], Any], release: Callable[[], None], limit: float | None
    ) -> None:
        self._place = place
        self._view = view
        self._value = value
        self._release = release
        self._limit = limit
        self._deadline = None if limit is None else time.monotonic() + limit
        try:
            super().__init__(committed_in(place, view))
        except BaseException:
            release()
            raise

    def get(self, key: bytes) -> Any:
        self._check_open()
        check_bounds(key, None)
        with map_errors(self._place.location):
            cell = run(self._view.get(DATA + key))
        self._check_frozen()
        return None if cell is None else self._value(read_values(self._place, [cell])[0])

    def scan(
        self, start: bytes | None = None, end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Any]]:
        self._check_open()
        check_bounds(start, end)
        return self._scan(start, end, reverse)

    def _scan(self, start: bytes | None, end: bytes | None, reverse: bool) -> Iterator[tuple[bytes, Any]]:
        for keys, cells in scan_cells(self._place, self._view, DATA, start, end, reverse):
            self._check_open()
            self._check_frozen()
            for part in groups(cells):
                for key, value in zip(keys[part], read_values(self._place, cells[part]), strict=True):
                    yield key, self._value(value)
                    self._check_open()

    def scan_prefix(self, prefix: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, Any]]:
        check_bounds(prefix, None)
        return self.scan(prefix, prefix_end(prefix), reverse=reverse)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._pid == os.getpid():
                self._release()

    def _check_frozen(self) -> None:
        """A reader of SlateDB's looks for news once more after it was opened; what it then shows is another epoch."""
        if committed_in(self._place, self._view) != self.epoch:
            raise StoreUnavailable(
                f"A snapshot of {self._place.location} moved on to a newer epoch while it was opened.",
                next_step="Open the snapshot again.",
            )

    def _check_open(self) -> None:
        super()._check_open()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise StoreClosed(
                f"This snapshot of {self._place.location} is older than {(self._limit or 0) / 60:.0f} minutes.",
                next_step="Pin the epoch and open snapshots at the pin.",
            )


def committed_in(place: Place, view: Any) -> Epoch:
    """The newest epoch that *view* sees; 0 when nothing was sealed yet."""
    with map_errors(place.location):
        stored = run(view.get(COMMITTED))
    return Epoch(int.from_bytes(stored, "big") if stored else 0)


def scan_cells(
    place: Place, view: Any, space: bytes, start: bytes | None = None, end: bytes | None = None, reverse: bool = False
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Keys (without their *space*) and raw cells, page by page."""
    if end is not None and (start or b"") >= end:
        return
    high = prefix_end(space) if end is None else space + end
    wanted = slate.KeyRange(start=space + (start or b""), start_inclusive=True, end=high, end_inclusive=False)
    order = slate.IterationOrder.DESCENDING if reverse else slate.IterationOrder.ASCENDING
    options = slate.ScanOptions(
        durability_filter=slate.DurabilityLevel.MEMORY,
        dirty=False,
        read_ahead_bytes=1 << 20,
        cache_blocks=True,
        max_fetch_tasks=2,
        order=order,
    )
    with map_errors(place.location):
        cursor = run(view.scan_with_options(wanted, options))
    while True:
        with map_errors(place.location):
            page = run(cursor.next_batch(_SCAN_CELLS))
        if not page:
            return
        yield [cell.key[len(space) :] for cell in page], [cell.value for cell in page]
