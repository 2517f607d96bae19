"""A capture beside a query, for users who run none: it follows the database for as long as the query runs.

:class:`QueryCapture` lives in the process in which Spark plans the query.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Final

from headwater.control.command import AddTables
from headwater.control.request import ask_capture
from headwater.sources.table import SourceTable
from headwater.spark.capture_child import CaptureKeeper, CaptureSettings
from headwater.spark.directories import cache_directory
from headwater.spark.errors import NoCapture
from headwater.spark.options import NONE, SourceOptions
from headwater.spark.tables import logged_table, no_table, source_table
from headwater.state.engines.claim import refuse_if_owned
from headwater.state.errors import StoreOwned
from headwater.state.location import split_location

START_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.05
_WATCH_SECONDS: Final = 2.0


def is_written(location: str) -> bool:
    """Whether a live process writes the store at *location*. It is only looked at."""
    engine, rest = split_location(location)
    if engine == "embedded":
        try:
            refuse_if_owned(Path(rest))
        except StoreOwned:
            return True
        return False
    if engine == "slatedb":
        from headwater.state.engines.lease import current_claim
        from headwater.state.engines.slate import Place

        claim = current_claim(Place.parse(rest, create=False))
        return claim is not None and claim.alive(time.time())
    return True


class QueryCapture:
    """Sees to it that the table of a query is captured."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._keeper = CaptureKeeper(self._settings)
        self._tables: tuple[str, ...] = ()
        """Tables of the next process that have no log."""
        self._looked = 0.0

    @property
    def pid(self) -> int | None:
        """Of the capture; ``None``: another process captures."""
        return self._keeper.pid

    def ensure(self) -> SourceTable:
        """The table, as its log has it; made sure that there is one.

        :raises NoCapture: nobody captures it, and we shall not; or it could not be begun.
        """
        table = logged_table(self._options)
        if not self._options.source:
            if table is None:
                raise no_table(self._options)
            return table
        running = is_written(self._options.store)
        if self._options.capture == NONE and not (running and table):
            missing = f"Nobody captures table {self._options.table} into {self._options.store}."
            step = f"headwater capture … --store {self._options.store} --table {self._options.table}"
            if running:
                step = f"headwater add-table {self._options.store} {self._options.table}"
            raise NoCapture(missing, next_step=f"Run: {step}. Or leave out option capture=none.")
        if table is None:
            full_name = source_table(self._options).full_name
            if running:
                ask_capture(self._options.store, AddTables((full_name,)))
            else:
                self._start(full_name)
            table = self._wait_for_log()
        elif not running:
            self._start()
        return table

    def watch(self) -> None:
        """Look now and then whether somebody still captures; begin when nobody does.

        :raises NoCapture: ours has ended and cannot go on by itself.
        """
        now = time.monotonic()
        if self._options.capture == NONE or now - self._looked < _WATCH_SECONDS:
            return
        self._looked = now
        self._check()
        if self._keeper.pid is None and not is_written(self._options.store):
            self._start()

    def _start(self, *tables: str) -> None:
        self._looked, self._tables = time.monotonic(), tables
        self._keeper.start()

    def _settings(self) -> CaptureSettings:
        options = self._options
        return CaptureSettings(
            options.source,
            options.store,
            str(_spill(options.store)),
            self._tables,
            slot=options.slot,
            publication=options.publication,
        )

    def _wait_for_log(self) -> SourceTable:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            table = logged_table(self._options)
            if table is not None:
                return table
            self._check()
            time.sleep(_LOOK_SECONDS)
        raise NoCapture(
            f"The capture of table {self._options.table} did not begin within {START_SECONDS:g} s.",
            next_step="Run: headwater doctor, with the connection string of the database.",
        )

    def _check(self) -> None:
        """:raises NoCapture: ours has ended, and no other was there first."""
        failure = self._keeper.check()
        if failure is not None and (failure.kind != StoreOwned.__name__ or not is_written(self._options.store)):
            next_step = failure.next_step or "Run: headwater capture, which shows more."
            raise NoCapture(failure.message, next_step=next_step)

    def close(self) -> None:
        self._keeper.stop()


def _spill(location: str) -> Path:
    """Where large transactions wait for their commit: always on this machine."""
    engine, rest = split_location(location)
    if engine == "embedded":
        return Path(rest) / "spill"
    return cache_directory() / "spill" / hashlib.sha256(location.encode()).hexdigest()[:12]
