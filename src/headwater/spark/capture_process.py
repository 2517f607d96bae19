"""A capture beside a query, for users who run none: it follows the database for as long as the query runs.

:class:`CaptureKeeper` lives in the process in which Spark plans the query; as a program, this module is the capture.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Final

from headwater.capture import Capture
from headwater.control.command import AddTables
from headwater.control.request import ask_capture
from headwater.errors import HeadwaterError
from headwater.sources.open import open_source
from headwater.sources.table import SourceTable
from headwater.spark.child import Child, end_with_parent, received, tell_error
from headwater.spark.directories import cache_directory
from headwater.spark.errors import NoCapture
from headwater.spark.options import NONE, SourceOptions
from headwater.spark.tables import logged_table, no_table, source_table
from headwater.state.engines.claim import refuse_if_owned
from headwater.state.errors import StoreOwned
from headwater.state.location import split_location
from headwater.system.memory import keep_freed_memory

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


class CaptureKeeper:
    """Sees to it that the table of a query is captured."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._child: Child | None = None
        self._looked = 0.0

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
                self._start([full_name])
            table = self._wait_for_log()
        elif not running:
            self._start([])
        return table

    def watch(self) -> None:
        """Look now and then whether somebody still captures; begin when nobody does.

        :raises NoCapture: ours has ended and cannot go on by itself.
        """
        now = time.monotonic()
        if self._options.capture == NONE or now - self._looked < _WATCH_SECONDS:
            return
        self._looked = now
        if self._child is not None and not self._child.is_running():
            self._give_up(self._child)
        if self._child is None and not is_written(self._options.store):
            self._start([])

    def _start(self, tables: list[str]) -> None:
        options = self._options
        self._looked = time.monotonic()
        self._child = Child(
            __name__,
            {
                "source": options.source,
                "store": options.store,
                "tables": tables,
                "slot": options.slot,
                "publication": options.publication,
            },
        )

    def _wait_for_log(self) -> SourceTable:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            table = logged_table(self._options)
            if table is not None:
                return table
            if self._child is not None and not self._child.is_running():
                self._give_up(self._child)
            time.sleep(_LOOK_SECONDS)
        raise NoCapture(
            f"The capture of table {self._options.table} did not begin within {START_SECONDS:g} s.",
            next_step="Run: headwater doctor, with the connection string of the database.",
        )

    def _give_up(self, child: Child) -> None:
        """Ours has ended. Another one that was there first is as good."""
        told = child.line(0) or {}
        child.close()
        self._child = None
        if told.get("kind") != StoreOwned.__name__ or not is_written(self._options.store):
            raise NoCapture(
                told.get("error", "The capture ended without a word."),
                next_step=told.get("next_step") or "Run: headwater capture, which shows more.",
            )

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def main() -> None:
    """Be the capture."""
    told = received()
    keep_freed_memory()
    source = open_source(
        told["source"],
        spill=_spill(told["store"]),
        slot=told["slot"],
        publication=told["publication"],
    )
    running = Capture(source, told["store"], told["tables"])
    end_with_parent(running.stop)
    try:
        running.run()
    except HeadwaterError as error:
        tell_error(error)


def _spill(location: str) -> Path:
    """Where large transactions wait for their commit: always on this machine."""
    engine, rest = split_location(location)
    if engine == "embedded":
        return Path(rest) / "spill"
    return cache_directory() / "spill" / hashlib.sha256(location.encode()).hexdigest()[:12]
