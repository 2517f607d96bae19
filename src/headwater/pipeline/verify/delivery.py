"""How far a mirror is: whether it shows all that committed at the source up to a position."""

from __future__ import annotations

import time
from dataclasses import dataclass

from headwater.backfill.control import status
from headwater.backfill.log_ranges import LogRanges
from headwater.sinks.sink import Sink
from headwater.sources.offset import CdcOffset
from headwater.sources.table import SourceTable
from headwater.state import StateReader, open_reader

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class QueryDelivery:
    """The delivery of one table by one query.

    :ivar store: location of the store that the capture writes. :ivar state: … of the query's state.
    """

    store: str
    state: str
    query: str
    sink: Sink
    table: SourceTable

    def __call__(self, position: CdcOffset, seconds: float) -> bool:
        """Wait until the capture has come to *position*, and the sink has what the log had then."""
        deadline = time.monotonic() + seconds
        epoch: int | None = None
        with open_reader(self.store) as reader:
            while True:
                if epoch is None:
                    epoch = _captured(reader, position)
                if epoch is not None and self._has(reader, epoch):
                    return True
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_LOOK_SECONDS)

    def _has(self, reader: StateReader, epoch: int) -> bool:
        told = status(self.state, self.query)
        if told is None:
            return False
        found = self.sink.committed(self.table, self.query, told.value["backfill"]).epoch
        delivered = max(found, told.value["epoch"])
        if delivered >= epoch:
            return True
        name = self.table.full_name
        with reader.snapshot() as view:
            return not LogRanges(view, [name]).changes(name, delivered, epoch)


def _captured(reader: StateReader, position: CdcOffset) -> int | None:
    """An epoch whose logs have everything up to *position*; ``None`` before there is one."""
    with reader.snapshot() as view:
        record = LogRanges(view, []).record
        return int(view.epoch) if record is not None and record.offset >= position else None
