"""A database that behaves as far as our statements can tell: tables in SQLite, and change data capture over them.

Triggers write every change into a log inside the transaction that makes it; a commit gives it a number. The capture job
shows what it has read of that log (:meth:`Engine.scan`): until then change data capture knows nothing of it. What is
said here of the shapes of the answers is from the public documentation; no server was there to compare with.
"""

from __future__ import annotations

import datetime as dt
import json
import pickle
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from tests.servers.sqlserver_double.tsql import closing, name_of, split_at_commas
from tests.servers.sqlserver_double.values import (
    converted,
    datediff,
    datepart,
    normal,
    parse_type,
    rank,
    switchoffset,
)

_FILE = 0x27
ZONES = {
    "UTC": ZoneInfo("UTC"),
    "W. Europe Standard Time": ZoneInfo("Europe/Berlin"),
    "Lord Howe Standard Time": ZoneInfo("Australia/Lord_Howe"),
}
_WIDE = {"nchar": 2, "nvarchar": 2}
_FIXED = {
    "tinyint": (1, 3, 0),
    "smallint": (2, 5, 0),
    "int": (4, 10, 0),
    "bigint": (8, 19, 0),
    "bit": (1, 1, 0),
    "float": (8, 53, 0),
    "real": (4, 24, 0),
    "money": (8, 19, 4),
    "smallmoney": (4, 10, 4),
    "uniqueidentifier": (16, 0, 0),
    "date": (3, 10, 0),
    "datetime": (8, 23, 3),
    "smalldatetime": (4, 16, 0),
}
_TEXTS = ("char", "varchar", "nchar", "nvarchar", "text", "ntext")


class Refused(Exception):
    """An error of the server. :ivar number: its number."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


@dataclass
class Column:
    number: int
    name: str
    kind: str
    nullable: bool = True
    default: str | None = None
    computed: str | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """``max_length``, ``precision`` and ``scale`` of the catalog."""
        name, size, scale = parse_type(self.kind)
        if name in _FIXED:
            return _FIXED[name]
        if name in ("decimal", "numeric"):
            return 17, size, scale
        if name in ("time", "datetime2", "datetimeoffset"):
            return 8, 27, size
        return -1 if size < 0 else size * _WIDE.get(name, 1), 0, 0

    @property
    def collation(self) -> str | None:
        return "SQL_Latin1_General_CP1_CI_AS" if parse_type(self.kind)[0] in _TEXTS else None


@dataclass
class Table:
    schema: str
    name: str
    number: int
    columns: list[Column]
    key: list[str]
    next_column: int = 0

    @property
    def stored(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def own(self) -> list[Column]:
        return [column for column in self.columns if column.computed is None]


@dataclass
class Instance:
    name: str
    table: Table
    number: int
    start: int
    columns: list[Column]
    alterations: list[tuple[int, str]] = field(default_factory=list)
    is_being_made: bool = False


@dataclass
class Commit:
    lsn: int
    time: dt.datetime
    has_changes: bool = True


class Engine:
    """One database in *folder*. Every session has a connection of its own (:meth:`connect`)."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "double.sqlite"
        self.lock = threading.RLock()
        self.name = "shop"
        self.broker = "11111111-2222-3333-4444-555555555555"
        self.fork = "66666666-7777-8888-9999-000000000000"
        self.version, self.level = "16.0.4135.4", 160
        self.zone, self.says_zone = "UTC", True
        self.has_cdc = False
        self.allows_snapshots = True
        self.tables: dict[tuple[str, str], Table] = {}
        self.instances: list[Instance] = []
        self.commits: list[Commit] = []
        self.scanned = 0
        self.scan_session, self.empty_scans = 1, 0
        self.agent_runs = True
        self.is_held_back = False
        self.failures = 0
        self.polls = 5
        self.hardened: int | None = None
        self.waits_for_backup = False
        self.masked: dict[str, str] = {}
        self.policies: dict[str, str] = {}
        self.switched: set[str] = set()
        self.seqvals_are_reversed = False
        self.is_gated = False
        self._block = 0x100
        self._number = 1000
        with self.connect() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(
                "CREATE TABLE log_ (n INTEGER PRIMARY KEY AUTOINCREMENT, tbl INTEGER, op INTEGER, row BLOB,"
                " lsn INTEGER)"
            )
            connection.execute("CREATE INDEX log_lsn ON log_ (lsn, tbl)")
        connection.close()

    def connect(self) -> sqlite3.Connection:
        made = sqlite3.connect(self._path, isolation_level=None, timeout=60, check_same_thread=False)
        made.execute("PRAGMA synchronous = OFF")
        functions: list[tuple[str, int, Callable[..., Any]]] = [
            ("NORMAL_", 2, normal),
            ("CONVERT_", -1, converted),
            ("TRY_CONVERT_", -1, _tried),
            ("DATEDIFF_", 3, datediff),
            ("DATEPART_", 2, datepart),
            ("SWITCHOFFSET", 2, switchoffset),
            ("SQL_VARIANT_PROPERTY", 2, lambda value, _: None if value is None else "nvarchar"),
            ("FN_CDC_IS_BIT_SET_", 2, lambda place, mask: int.from_bytes(mask, "big") >> (place - 1) & 1),
            ("ROW_", -1, lambda numbers, *values: pickle.dumps(dict(zip(json.loads(numbers), values, strict=True)))),
        ]
        for name, count, function in functions:
            made.create_function(name, count, function, deterministic=True)
        for kind in ("uniqueidentifier", "decimal", "datetimeoffset", "varchar"):
            made.create_collation(kind, _comparison(kind))
        return made

    # -- the log -----------------------------------------------------------------------------------------------------

    def next_lsn(self) -> int:
        with self.lock:
            self._block += 8
            return _FILE << 48 | self._block << 16 | 3

    @property
    def log_end(self) -> int:
        with self.lock:
            return _FILE << 48 | self._block << 16 | 4

    def commit(self, connection: sqlite3.Connection) -> None:
        """End the transaction of *connection*; its changes get one number."""
        with self.lock:
            lsn = self.next_lsn()
            tracked = ", ".join(str(instance.table.number) for instance in self.instances) or "0"
            (is_captured,) = connection.execute(
                f"SELECT EXISTS (SELECT 1 FROM log_ WHERE lsn IS NULL AND tbl IN ({tracked}))"
            ).fetchone()
            connection.execute("UPDATE log_ SET lsn = ? WHERE lsn IS NULL", (lsn,))
            connection.execute("COMMIT")
            if is_captured:
                self.commits.append(Commit(lsn, dt.datetime.now(dt.UTC)))

    def local_us(self, instant: dt.datetime) -> int:
        """What the clock on the server's wall shows, in microseconds."""
        since = instant - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
        return (since + dt.timedelta(minutes=self.minutes(self.zone, instant))) // dt.timedelta(microseconds=1)

    def minutes(self, zone: str, instant: dt.datetime) -> int:
        """The offset of a zone at an instant."""
        if zone not in ZONES:
            raise Refused(9820, "The time zone parameter provided to AT TIME ZONE clause is invalid.")
        offset = instant.astimezone(ZONES[zone]).utcoffset()
        assert offset is not None
        return round(offset.total_seconds() / 60)

    def note_time(self) -> None:
        """What the server does every few minutes when nothing is changed: an entry for how far it has come."""
        with self.lock:
            self.commits.append(Commit(self.log_end, dt.datetime.now(dt.UTC), has_changes=False))

    def scan(self) -> None:
        """What the capture job does each time it looks: it finds nothing that it is held back from.

        Held back it is by :attr:`is_held_back`, which nobody can see, and by a replica that has the log up to
        :attr:`hardened` alone.
        """
        with self.lock:
            limit = self.scanned if self.is_held_back else self.hardened
            shown = [one.lsn for one in self.commits if limit is None or one.lsn <= limit]
            last = shown[-1] if shown else 0
            if last > self.scanned:
                self.scanned = last
                self.scan_session, self.empty_scans = self.scan_session + 1, 0
            else:
                self.empty_scans += 1

    @property
    def max_lsn(self) -> int | None:
        return self.scanned or None

    def purge(self, below: int) -> None:
        """What the cleanup job does."""
        with self.lock:
            for instance in self.instances:
                instance.start = max(instance.start, below)

    # -- tables ------------------------------------------------------------------------------------------------------

    def table(self, schema: str, name: str) -> Table:
        for (its_schema, its_name), table in self.tables.items():
            if (its_schema.lower(), its_name.lower()) == (schema.lower(), name.lower()):
                return table
        raise Refused(208, f"Invalid object name '{schema}.{name}'.")

    def create(self, connection: sqlite3.Connection, schema: str, name: str, body: Sequence[str]) -> None:
        with self.lock:
            self._number += 1
            table = Table(schema, name, self._number, [], [])
            for part in split_at_commas(body):
                words = [word.upper() for word in part]
                if "PRIMARY" in words[:1] or words[:1] == ["CONSTRAINT"]:
                    begin = part.index("(")
                    table.key = [name_of(word) for word in part[begin + 1 : closing(part, begin)] if word != ","]
                    continue
                column = _column(table, part)
                if "PRIMARY" in words:
                    table.key = [column.name]
                    column.nullable = False
                table.columns.append(column)
            for column in table.columns:
                column.nullable = column.nullable and column.name not in table.key
            if (schema, name) in self.tables:
                raise Refused(2714, f"There is already an object named '{name}' in the database.")
            columns = ", ".join(_declared(column) for column in table.columns)
            key = ", PRIMARY KEY (" + ", ".join(f'"{one}"' for one in table.key) + ")" if table.key else ""
            connection.execute(f'CREATE TABLE "{table.stored}" ({columns}{key})')
            self.tables[schema, name] = table
            self.next_lsn()
            self._triggers(connection, table)

    def drop(self, connection: sqlite3.Connection, schema: str, name: str) -> None:
        with self.lock:
            table = self.table(schema, name)
            connection.execute(f'DROP TABLE "{table.stored}"')
            del self.tables[table.schema, table.name]
            self.instances = [one for one in self.instances if one.table is not table]

    def alter(self, connection: sqlite3.Connection, schema: str, name: str, words: Sequence[str], text: str) -> None:
        """``ADD column type …``, ``ALTER COLUMN name type`` and ``DROP COLUMN name``."""
        with self.lock:
            table = self.table(schema, name)
            self._drop_triggers(connection, table)
            if words[0].upper() == "ADD":
                for part in split_at_commas(words[1:]):
                    column = _column(table, part)
                    connection.execute(f'ALTER TABLE "{table.stored}" ADD COLUMN {_declared(column)}')
                    table.columns.append(column)
            elif words[0].upper() == "ALTER":
                column = next(one for one in table.columns if one.name == name_of(words[2]))
                column.kind = "".join(words[3:]).lower()  # that of the change tables follows it
                connection.execute(
                    f'UPDATE "{table.stored}" SET "{column.name}" = NORMAL_(\'{column.kind}\', "{column.name}")'
                )
            else:
                gone = name_of(words[2])
                connection.execute(f'ALTER TABLE "{table.stored}" DROP COLUMN "{gone}"')
                table.columns = [column for column in table.columns if column.name != gone]
            lsn = self.next_lsn()
            for instance in self.instances:
                if instance.table is table:
                    instance.alterations.append((lsn, text))
            self._triggers(connection, table)

    def _drop_triggers(self, connection: sqlite3.Connection, table: Table) -> None:
        for kind in ("insert", "update", "delete"):
            connection.execute(f'DROP TRIGGER IF EXISTS "{table.stored}.{kind}"')

    def _triggers(self, connection: sqlite3.Connection, table: Table) -> None:
        own = table.own

        def row(of: str) -> str:
            values = "".join(f", NORMAL_('{column.kind}', {of}.\"{column.name}\")" for column in own)
            return f"ROW_('{json.dumps([column.number for column in own])}'{values})"

        def logged(op: int, of: str) -> str:
            return f"INSERT INTO log_ (tbl, op, row) VALUES ({table.number}, {op}, {row(of)});"

        changes = " OR ".join(
            f"NORMAL_('{one.kind}', OLD.\"{one.name}\") IS NOT NORMAL_('{one.kind}', NEW.\"{one.name}\")" for one in own
        )
        moves = " OR ".join(f'OLD."{name}" IS NOT NEW."{name}"' for name in table.key) or "0"
        set_all = ", ".join(f'"{one.name}" = NORMAL_(\'{one.kind}\', "{one.name}")' for one in own)
        settle = f'UPDATE "{table.stored}" SET {set_all} WHERE rowid = NEW.rowid;'
        connection.execute(
            f'CREATE TRIGGER "{table.stored}.insert" AFTER INSERT ON "{table.stored}"'
            f" BEGIN {logged(2, 'NEW')} {settle} END"
        )
        pair = (
            f"INSERT INTO log_ (tbl, op, row) SELECT {table.number}, CASE WHEN {moves} THEN 1 ELSE 3 END, {row('OLD')};"
            f"INSERT INTO log_ (tbl, op, row) SELECT {table.number}, CASE WHEN {moves} THEN 2 ELSE 4 END, {row('NEW')};"
        )
        connection.execute(
            f'CREATE TRIGGER "{table.stored}.update" AFTER UPDATE ON "{table.stored}" WHEN {changes}'
            f" BEGIN {pair} {settle} END"
        )
        connection.execute(
            f'CREATE TRIGGER "{table.stored}.delete" AFTER DELETE ON "{table.stored}" BEGIN {logged(1, "OLD")} END'
        )

    # -- change data capture -----------------------------------------------------------------------------------------

    def enable(self, schema: str, name: str, instance: str | None, listed: str | None = None) -> None:
        """:param listed: names of columns with commas between them; all by default."""
        with self.lock:
            if not self.has_cdc:
                raise Refused(22901, "The database is not enabled for Change Data Capture.")
            table = self.table(schema, name)
            named = instance or f"{schema}_{name}"
            if any(one.name == named for one in self.instances):
                raise Refused(22926, f"Could not create a capture instance because the name '{named}' is in use.")
            if sum(one.table is table for one in self.instances) == 2:
                raise Refused(22962, "Two capture instances already exist for the source table.")
            self._number += 1
            chosen = None if listed is None else {one.strip() for one in listed.split(",")}
            columns = [column for column in table.columns if chosen is None or column.name in chosen]
            self.instances.append(Instance(named, table, self._number, self.next_lsn(), columns))

    def disable(self, schema: str, name: str, instance: str) -> None:
        with self.lock:
            table = self.table(schema, name)
            self.instances = [
                one for one in self.instances if one.table is not table or instance not in (one.name, "all")
            ]

    def changes(
        self, connection: sqlite3.Connection, named: str, first: int, last: int
    ) -> tuple[Instance, list[list[Any]]]:
        """The rows of ``cdc.…_CT``: start_lsn, seqval, operation, command_id, update_mask, columns.

        With :attr:`seqvals_are_reversed` an update of the key has its insert before its delete, by seqval.
        """
        with self.lock:
            instance = next((one for one in self.instances if f"{one.name}_CT" == named), None)
            if instance is None:
                raise Refused(208, f"Invalid object name 'cdc.{named}'.")
            columns = list(instance.columns)
            first, last = max(first, instance.start), min(last, self.scanned)
        found: list[list[Any]] = []
        for number, op, row, lsn in connection.execute(
            "SELECT n, op, row, lsn FROM log_ WHERE lsn BETWEEN ? AND ? AND tbl = ? ORDER BY n",
            (first, last, instance.table.number),
        ):
            values = pickle.loads(row)
            seqval = number - 1 if op == 4 else number
            if self.seqvals_are_reversed:
                seqval = (1 << 40) - seqval
            told = [values.get(column.number) for column in columns]
            mask = (1 << len(columns)) - 1
            if op == 4:
                before = found[-1][5:]
                changed = [values.get(column.number) != was for column, was in zip(columns, before, strict=True)]
                mask = sum(1 << place for place, is_changed in enumerate(changed) if is_changed)
                found[-1][4] = mask.to_bytes(16, "big")
                for place, column in enumerate(columns):
                    if _is_old_text(column) or (parse_type(column.kind)[1] < 0 and not changed[place]):
                        found[-1][5 + place] = None
            if op == 1:
                told = [None if _is_old_text(column) else value for column, value in zip(columns, told, strict=True)]
            found.append(
                [lsn.to_bytes(10, "big"), seqval.to_bytes(10, "big"), op, number, mask.to_bytes(16, "big"), *told]
            )
        return instance, found


def _is_old_text(column: Column) -> bool:
    return parse_type(column.kind)[0] in ("text", "ntext", "image")


def _tried(*arguments: Any) -> Any:
    try:
        return converted(*arguments)
    except (ValueError, ArithmeticError):
        return None


def _comparison(kind: str) -> Callable[[str, str], int]:
    def compare(one: str, other: str) -> int:
        try:
            left, right = rank(kind, one), rank(kind, other)
        except (ValueError, ArithmeticError):
            left, right = one, other
        return int(left > right) - int(left < right)

    return compare


def _column(table: Table, words: Sequence[str]) -> Column:
    table.next_column += 1
    name, upper = name_of(words[0]), [word.upper() for word in words]
    if upper[1] == "AS":
        end = closing(words, 2)
        return Column(table.next_column, name, "int", computed=" ".join(words[2 : end + 1]))
    kind = name_of(words[1]).lower()
    if len(words) > 2 and words[2] == "(":
        kind += "".join(words[2 : closing(words, 2) + 1]).lower()
    nullable = not any(upper[place : place + 2] == ["NOT", "NULL"] for place in range(len(upper)))
    default = None
    if "DEFAULT" in upper:
        at = upper.index("DEFAULT") + 1
        default = " ".join(words[at : closing(words, at) + 1]) if words[at] == "(" else words[at]
    return Column(table.next_column, name, kind, nullable, default)


def _declared(column: Column) -> str:
    """A column for SQLite."""
    if column.computed is not None:
        return f'"{column.name}" AS {column.computed}'
    name, _, _ = parse_type(column.kind)
    if name in ("tinyint", "smallint", "int", "bigint", "bit"):
        made = "INTEGER"
    elif name in ("float", "real"):
        made = "REAL"
    elif name in ("binary", "varbinary", "image", "timestamp", "rowversion"):
        made = "BLOB"
    elif name in ("decimal", "numeric", "money", "smallmoney"):
        made = "TEXT COLLATE decimal"
    elif name in ("uniqueidentifier", "datetimeoffset"):
        made = f"TEXT COLLATE {name}"
    elif name in _TEXTS:
        made = "TEXT COLLATE varchar"
    else:
        made = "TEXT"
    default = "" if column.default is None else f" DEFAULT ({column.default.removeprefix('N')})"
    return f'"{column.name}" {made}{"" if column.nullable else " NOT NULL"}{default}'
