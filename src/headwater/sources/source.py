"""Source: what the capture needs of a database, whatever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from headwater.sources.events import ChangeStream, Checked, Registered
from headwater.sources.offset import CdcOffset
from headwater.sources.table import SourceTable


class Source(Protocol):
    """One database whose log can be followed."""

    @property
    def name(self) -> str:
        """For messages and metrics: where it is, without the password."""
        ...

    @property
    def position_type(self) -> pa.DataType:
        """The Arrow type of the column ``_position``, whose bytes order as the commits do."""
        ...

    def tables(self, names: Sequence[str]) -> list[SourceTable]:
        """The tables of these names, as they are now.

        :raises SourceNotFound: there is none of that name. :raises UnsupportedTable: it cannot be captured.
        """
        ...

    def begin(self, tables: Sequence[SourceTable], *, resumed: bool) -> tuple[CdcOffset, Mapping[str, Any]]:
        """Prepare the source to keep its log for us; where the stream will start, and who the source is.

        :param resumed: it was called before for this store, which crashed before it held the answer: what is there at
            the source may be its own. Otherwise it is somebody else's.
        :raises SourceMisconfigured: what is needed at the source is there already, and not ours.
        """
        ...

    def claim(self, prepared: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Who the source is now, before it is prepared anew; nothing is changed there.

        :param prepared: the sources that this store has prepared before: what is found at one of them is its own.
        :raises SourceMisconfigured: what is needed at the source is there already, and not ours.
        """
        ...

    def renew(self, tables: Sequence[SourceTable]) -> tuple[CdcOffset, Mapping[str, Any]]:
        """As :meth:`begin`, after a gap: what was claimed at the source is given up, and its log is kept from now on.

        :raises SlotBusy: another process reads what is to be given up; nothing was changed but the publication.
        :raises UnsupportedTable: one of the tables cannot be captured.
        """
        ...

    def open(self, tables: Sequence[SourceTable], start: CdcOffset, identity: Mapping[str, Any]) -> ChangeStream:
        """The stream of *tables* from *start* on.

        :raises SourceError: the source cannot continue there: never a silent gap.
        """
        ...

    def include(self, tables: Sequence[SourceTable]) -> CdcOffset:
        """Make the source log the changes of more tables; the position after which it logs all of them.

        :raises UnsupportedTable: one cannot be captured beside the others.
        :raises SourceBusy: transactions that began before stayed open; calling again goes on.
        """
        ...

    def has_reached(self, position: CdcOffset) -> bool:
        """Whether the open stream has told all that was committed before *position*."""
        ...

    def register(self, tables: Sequence[SourceTable]) -> Mapping[str, str]:
        """How the source has each table registered for us, by name: whatever must not change behind our back."""
        ...

    def check(self, tables: Sequence[Registered]) -> Checked:
        """Look whether the source still logs these tables for us, and make its log go on where it is idle.

        What is found is told once the open stream has passed the place where it was seen: the changes before it count.

        :raises SourceError: it does not log for us at all; what to do.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class AlwaysLogging(Protocol):
    """A source whose log may have, or lack, what a table was before it was captured."""

    def begin_from(self, since: Mapping[str, CdcOffset]) -> None:
        """Since when each table is captured, before the stream is opened.

        What its log has of a table up to there is not of interest, and may be of any former shape.
        """
        ...


@runtime_checkable
class Registering(Protocol):
    """A source that must know, when its stream is opened, how its tables were registered before."""

    def resume(self, tables: Sequence[Registered]) -> None:
        """What :meth:`Source.register` or :meth:`Source.check` told last of each table, before the stream is opened."""
        ...
