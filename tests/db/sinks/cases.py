"""Every kind of sink in every mode: where each is opened for a test, and how its rows are read.

A kind that :data:`headwater.sinks.open.KINDS` has and this module does not is found by ``test_every_kind_has_a_place``.
"""

from __future__ import annotations

import itertools
import json
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.types as pt
from tests.sampled import share
from tests.servers.mysql_family import FAMILY, start_server
from tests.servers.postgres import NEWEST, PostgresServer

from headwater.sinks.change_rows import changes_schema
from headwater.sinks.open import KINDS, open_sink, sink_class
from headwater.sinks.sink import Mode, Sink
from headwater.sinks.types import sink_schema
from headwater.sinks.versions import versions_schema
from headwater.sources.table import SourceTable

_numbers = itertools.count(1)
_SCHEMAS: Final[dict[Mode, Callable[[pa.Schema], pa.Schema]]] = {
    Mode.MIRROR: lambda own: own,
    Mode.CHANGES: changes_schema,
    Mode.HISTORY: versions_schema,
}


@dataclass(frozen=True)
class Case:
    """A kind of sink in one of its modes. :ivar family: of its server, where several families take its rows."""

    kind: str
    mode: Mode
    family: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.kind, self.family, self.mode.value)))


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
    """A fresh place for sinks of one case. It can be pickled.

    :ivar options: that open a sink there.
    """

    case: Case
    options: dict[str, Any] = field(default_factory=dict)

    def sink(self, **options: Any) -> Sink:
        return open_sink(self.case.kind, **{"mode": self.case.mode, **self.options, **options})

    def left(self) -> list[str]:
        """What is still staged: names of files or relations."""
        find = LEFT.get(self.case.kind)
        return [] if find is None else find(self.options)

    def schema(self, table: SourceTable) -> pa.Schema:
        """The columns that readers find."""
        return _SCHEMAS[self.case.mode](sink_schema(table))

    def rows(self, sink: Sink, table: SourceTable, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """What readers see now."""
        names = list(columns or self.schema(table).names)
        read = READERS.get(self.case.kind)
        if read is not None:
            return [{name: row.get(name) for name in names} for row in read(sink, table)]
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


@contextmanager
def _warehouse(case: Case, folder: Path, servers: Servers) -> Iterator[Place]:
    yield Place(case, {"warehouse": str(folder / "lake")})


@contextmanager
def _kafka(case: Case, folder: Path, servers: Servers) -> Iterator[Place]:
    from tests.servers.kafka import KafkaServer

    server = servers.get("kafka", KafkaServer)
    topic = f"t{next(_numbers)}.{{namespace}}.{{table}}"
    yield Place(case, {"brokers": server.brokers, "topic": topic, "staging": str(folder / "staging"), "replication": 1})


@contextmanager
def _mysql(case: Case, folder: Path, servers: Servers) -> Iterator[Place]:
    from headwater.sinks.mysql import SESSIONS

    number = next(_numbers)
    family = case.family or FAMILY[0]
    server = servers.get(family, lambda: start_server(family, {"local-infile": "ON"}))
    yield Place(case, {"dsn": server.dsn, "database": f"d{number}", "own_database": f"own{number}"})
    SESSIONS.close()


@contextmanager
def _console(case: Case, folder: Path, servers: Servers) -> Iterator[Place]:
    yield Place(case, {"path": str(folder / "lines"), "format": "json", "staging": str(folder / "staging")})


@contextmanager
def _webhook(case: Case, folder: Path, servers: Servers) -> Iterator[Place]:
    server = servers.get("webhook", _hook_server)
    address = f"http://127.0.0.1:{server.server_port}{folder / 'lines'}"
    yield Place(case, {"url": address, "staging": str(folder / "staging")})


@contextmanager
def _hook_server() -> Iterator[ThreadingHTTPServer]:
    """Takes each key once, and appends what is posted to the file that the address names."""
    taken: set[tuple[str, str | None]] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = (self.path, self.headers["Idempotency-Key"])
            if request not in taken:
                taken.add(request)
                with Path(unquote(self.path)).open("ab") as file:
                    file.write(body)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


PLACES: Final[dict[str, Open]] = {
    "console": _console,
    "delta": _directory,
    "iceberg": _warehouse,
    "kafka": _kafka,
    "mysql": _mysql,
    "parquet": _directory,
    "postgres": _postgres,
    "table": _directory,
    "webhook": _webhook,
}


def _messages(sink: Any, table: SourceTable) -> list[dict[str, Any]]:
    """The rows that messages tell; of a mirror the newest of each key."""
    from tests.servers.kafka import read_topic

    found = [(key, value) for _, key, value in read_topic(sink.brokers, sink.topic_of(table))]
    values = [value for _, value in found] if sink.mode is Mode.CHANGES else list(dict(found).values())
    schema = _SCHEMAS[sink.mode](sink_schema(table))
    told = [json.loads(value, parse_int=_number) for value in values if value is not None]
    return [of_json(row, pa.struct(list(schema))) for row in told]


def _lines(sink: Any, table: SourceTable) -> list[dict[str, Any]]:
    """The rows that lines of JSON tell, one step after the other."""
    file = Path(unquote(urlsplit(sink.url).path) if hasattr(sink, "url") else sink.path)
    lines = [json.loads(line, parse_int=_number) for line in file.read_text().splitlines()] if file.exists() else []
    told = [line for line in lines if line["_table"] == table.full_name]
    schema = _SCHEMAS[sink.mode](sink_schema(table))
    if sink.mode is Mode.MIRROR:
        told = list(_after_steps(told, table.key_columns).values())
    return [of_json(row, pa.struct(list(schema))) for row in told]


def _after_steps(lines: list[dict[str, Any]], key_columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    now: dict[str, dict[str, Any]] = {}
    for line in lines:
        key = "" if line["_step"] == "clear" else json.dumps([line[name] for name in key_columns])
        if line["_step"] == "clear":
            now.clear()
        elif line["_step"] == "delete":
            now.pop(key, None)
        elif line["_step"] == "upsert" or key in now:
            now[key] = {**now.get(key, {}), **line}
    return now


def _number(text: str) -> float:
    return -0.0 if text == "-0" else int(text)


def of_json(value: Any, kind: pa.DataType) -> Any:
    """The value of type *kind* that JSON text tells."""
    if value is None:
        return None
    if pt.is_floating(kind):
        return float(np.float32(value)) if pt.is_float32(kind) else float(value)
    if pt.is_decimal(kind):
        return pa.scalar(Decimal(value), kind).as_py()
    if pt.is_binary(kind):
        return b64decode(value)
    if pt.is_date(kind):
        return date.fromisoformat(value)
    if pt.is_timestamp(kind):
        return datetime.fromisoformat(value)
    if pt.is_list(kind):
        return [of_json(one, kind.value_type) for one in value]
    if pt.is_map(kind):
        return [(key, of_json(one, kind.item_type)) for key, one in value.items()]
    if pt.is_struct(kind):
        return {field.name: of_json(value.get(field.name), field.type) for field in kind}
    return value


COLUMNS_BY_ID: Final = frozenset({"iceberg"})
"""Kinds of which also old changes have the new name of a column that was renamed."""
FINITE_FLOATS: Final = frozenset({"mysql"})
"""Kinds that have no NaN and no infinities, of which a row is refused, and only one zero."""
KEYLESS: Final = frozenset({"console", "webhook"})
"""Kinds of which a part of a table cannot be replaced: nobody knows which keys they have."""
FIXED_MESSAGES: Final = frozenset({"console", "kafka", "webhook"})
"""Kinds whose messages stay as they were sent."""

READERS: Final[dict[str, Callable[[Any, SourceTable], list[dict[str, Any]]]]] = {
    "console": _lines,
    "kafka": _messages,
    "webhook": _lines,
}
"""How the rows of sinks are read that do not read them themselves."""


def _left_files(options: dict[str, Any]) -> list[str]:
    root = Path(next(options[name] for name in ("path", "warehouse", "staging") if name in options))
    return [
        str(path.relative_to(root))
        for pattern in ("**/*.arrow", "**/_staging/**/*.parquet")
        for path in root.glob(pattern)
    ]


def _left_relations(options: dict[str, Any]) -> list[str]:
    with psycopg.connect(options["dsn"]) as session:
        return [name for (name,) in session.execute("SELECT relname FROM pg_class WHERE relname ~ '^s[0-9a-f]{16}_'")]


def _left_tables(options: dict[str, Any]) -> list[str]:
    import pymysql

    at = urlsplit(options["dsn"])
    address = {"host": at.hostname, "port": at.port, "user": at.username, "password": at.password}
    with pymysql.connect(**address) as session, session.cursor() as cursor:
        cursor.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND table_name RLIKE %s",
            (options["own_database"], "^s[0-9a-f]{16}_"),
        )
        return [name for (name,) in cursor.fetchall()]


def _left_runs(options: dict[str, Any]) -> list[str]:
    from headwater.versioned.folder import TableFolder

    left: list[str] = []
    for runs in Path(options["path"]).glob("*/runs"):
        named = {run.name for run in TableFolder(options["path"], runs.parent.name).newest().runs}
        left += [path.name for path in runs.iterdir() if path.name not in named]
    return left


LEFT: Final[dict[str, Callable[[dict[str, Any]], list[str]]]] = {
    "delta": _left_files,
    "iceberg": _left_files,
    "kafka": _left_files,
    "mysql": _left_tables,
    "parquet": _left_files,
    "postgres": _left_relations,
    "table": _left_runs,
}

CASES: Final = [Case(kind, mode) for kind in KINDS if kind in PLACES for mode in sink_class(kind).capabilities.modes]

ON_FAMILIES: Final = [
    replace(case, family=family)
    for number, case in enumerate(CASES)
    for family in (share(FAMILY, number, len(FAMILY)) if case.kind == "mysql" else [""])
]
"""The same, each on a server of every family that takes its rows; by default on one of them in turn."""
