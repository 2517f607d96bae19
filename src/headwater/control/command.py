"""Command: what a request asks, one class for each kind.

============  ==========================================================================================
asked of      commands
============  ==========================================================================================
capture       :class:`AddTables`, :class:`RecaptureTables`, :class:`RecaptureSource`, :class:`MigrateLog`,
              :class:`CompactLog`, :class:`NoteEvent`
query         :class:`PauseBackfill`, :class:`ResumeBackfill`, :class:`ThrottleBackfill`,
              :class:`ResnapshotTable`
pipeline      :class:`PauseSinks`, :class:`ResumeSinks`, :class:`RetrySink`, :class:`RewindSink`,
              :class:`DropSink`, :class:`AddSink`, :class:`StopPipeline`
============  ==========================================================================================

A query over an upstream table has no backfill apart from its changes: there the commands of a query are about all that
it reads. Commands travel as JSON: an object with the fields and the ``type``.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Final, get_args


@dataclass(frozen=True, slots=True)
class AddTables:
    """Capture these tables, too."""

    tables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecaptureTables:
    """Capture these tables again from now on. :ivar is_patient: where the source is busy, try until it is not."""

    tables: tuple[str, ...]
    is_patient: bool = False


@dataclass(frozen=True, slots=True)
class RecaptureSource:
    """Prepare the source again, and capture all tables from there on."""


@dataclass(frozen=True, slots=True)
class MigrateLog:
    """Rewrite a log in the newest format."""

    log: str


@dataclass(frozen=True, slots=True)
class CompactLog:
    """Keep only the newest row of each key in the sealed epochs of a log."""

    log: str


@dataclass(frozen=True, slots=True)
class NoteEvent:
    """Note *text* among the events of a log."""

    log: str
    text: str


@dataclass(frozen=True, slots=True)
class PauseBackfill:
    """Read no more of the backfill of one table, or of all; changes flow on."""

    table: str | None = None


@dataclass(frozen=True, slots=True)
class ResumeBackfill:
    """Go on reading the backfill of one table, or of all."""

    table: str | None = None


@dataclass(frozen=True, slots=True)
class ThrottleBackfill:
    """Read at most this many rows of backfill per second, for each table. ``None``: no limit."""

    rows_per_second: int | None
    table: str | None = None


@dataclass(frozen=True, slots=True)
class ResnapshotTable:
    """Read one table, or all, once more; or a range of its keys, both ends included; or some of its columns."""

    table: str | None = None
    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PauseSinks:
    """Deliver nothing to one sink, or to all, until they are resumed."""

    sink: str | None = None


@dataclass(frozen=True, slots=True)
class ResumeSinks:
    """Deliver again to all sinks that are paused; or to one, which begins again if it was dropped."""

    sink: str | None = None


@dataclass(frozen=True, slots=True)
class RetrySink:
    """Start a sink that failed, now; the tables that it parked return."""

    sink: str


@dataclass(frozen=True, slots=True)
class RewindSink:
    """Deliver again what came after *epoch*; ``None``: what the sink lacks."""

    sink: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class DropSink:
    """Forget all that is known of a sink; its logs do not wait for it."""

    sink: str


@dataclass(frozen=True, slots=True)
class AddSink:
    """Deliver to a sink that is new in the pipeline's file."""

    sink: str


@dataclass(frozen=True, slots=True)
class StopPipeline:
    """End the pipeline: batches end, the capture seals."""


CaptureCommand = AddTables | RecaptureTables | RecaptureSource | MigrateLog | CompactLog | NoteEvent
QueryCommand = PauseBackfill | ResumeBackfill | ThrottleBackfill | ResnapshotTable
SinkCommand = PauseSinks | ResumeSinks | RetrySink | RewindSink | DropSink
PipelineCommand = SinkCommand | AddSink | StopPipeline
Command = CaptureCommand | QueryCommand | PipelineCommand


def command_name(kind: type) -> str:
    """``pause_backfill`` of :class:`PauseBackfill`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


_KINDS: Final[dict[str, Any]] = {command_name(kind): kind for kind in get_args(Command)}


def command_to_json(command: Command) -> dict[str, Any]:
    """A value for :func:`json.dumps`."""
    return {"type": command_name(type(command)), **asdict(command)}


def command_from_json(value: dict[str, Any]) -> Command:
    """The inverse of :func:`command_to_json`. :raises ValueError: it is no command that this release knows."""
    try:
        fields = {name: tuple(field) if isinstance(field, list) else field for name, field in value.items()}
        command: Command = _KINDS[str(fields.pop("type"))](**fields)
    except (AttributeError, KeyError, TypeError):
        raise ValueError("it is no command of this release") from None
    return command
