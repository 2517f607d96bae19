"""Every kind of sink in every mode: where each is opened for a test, and how its rows are read.

A kind that :data:`headwater.sinks.open.KINDS` has and this module does not is found by ``test_every_kind_has_a_place``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from tests.servers.postgres import NEWEST, PostgresServer

from headwater.sinks import open_sink
from headwater.sinks.change_rows import changes_schema
from headwater.sinks.open import KINDS, sink_class
from headwater.sinks.sink import Mode, Sink
from headwater.sinks.types import sink_schema
from headwater.sinks.versions import versions_schema
from headwater.sources.table import SourceTable

_SCHEMAS: Final[dict[Mode, Callable[[pa.Schema], pa.Schema]]] = {
    Mode.MIRROR: lambda own: own,
    Mode.CHANGES: changes_schema,
    Mode.HISTORY: versions_schema,
}


@dataclass(frozen=True)
class Case:
    """A kind of sink in one of its modes."""

    kind: str
    mode: Mode

    def __str__(self) -> str:
        return f"{self.kind}-{self.mode.value}"


class Servers:
    """The servers of a test session, each started when it is first asked for, and ended with it."""

    def __init__(self) -> None:
        self._started: dict[str, Any] = {}
        self._ends = ExitStack()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def get(self, name: str, start: Callable[[], Any]) -> Any:
        """The server *name*; *start* gives a context manager."""
        if name not in self._started:
            self._started[name] = self._ends.enter_context(start())
        return self._started[name]


@dataclass
class Place:
    """A fresh place for sinks of one case.

    :ivar options: that open a sink there. :ivar read: its rows, where the sink itself does not read them.
    """

    case: Case
    options: dict[str, Any] = field(default_factory=dict)
    read: Callable[[Sink, SourceTable], list[dict[str, Any]]] | None = None

    def sink(self, **options: Any) -> Sink:
        return open_sink(self.case.kind, **{"mode": self.case.mode, **self.options, **options})

    def schema(self, table: SourceTable) -> pa.Schema:
        """The columns that readers find."""
        return _SCHEMAS[self.case.mode](sink_schema(table))

    def rows(self, sink: Sink, table: SourceTable, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """What readers see now."""
        names = list(columns or self.schema(table).names)
        if self.read is not None:
            return [{name: row.get(name) for name in names} for row in self.read(sink, table)]
        return [row for batch in sink.shown(table, names) for row in batch.to_pylist()]


Open = Callable[[Case, Path, Servers], Any]


@contextmanager
def _directory(case: Case, folder: Path, servers: Servers) -> Iterator[Place]:
    yield Place(case, {"path": str(folder / "lake")})


@contextmanager
def _postgres(case: Case, folder: Path, servers: Servers) -> Iterator[Place]:
    from headwater.sinks.postgres import SESSIONS

    server = servers.get("postgres", lambda: PostgresServer(NEWEST))
    with server.database() as database:
        yield Place(case, {"dsn": database.dsn})
        SESSIONS.close()


PLACES: Final[dict[str, Open]] = {
    "delta": _directory,
    "parquet": _directory,
    "postgres": _postgres,
}

CASES: Final = [Case(kind, mode) for kind in KINDS if kind in PLACES for mode in sink_class(kind).capabilities.modes]
