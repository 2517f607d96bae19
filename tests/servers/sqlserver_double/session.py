"""One session at the double: statements in, rows or errors out. It answers ours and those of the tests alone."""

from __future__ import annotations

import datetime as dt
import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tests.servers.sqlserver_double.engine import Engine, Refused
from tests.servers.sqlserver_double.tsql import closing, name_of, statements_of, text_of, to_sqlite
from tests.servers.sqlserver_double.values import converted, parse_type, rank

Rows = tuple[list[str], list[list[Any]]]


class DoubleSession:
    """:param rights: ``state``: it may look at how the server is."""

    def __init__(self, engine: Engine, rights: set[str]) -> None:
        self._engine, self._rights = engine, rights
        self._connection = engine.connect()
        self._is_snapshot = False

    def close(self) -> None:
        self._connection.close()

    def run(self, batch: str) -> Iterator[Rows]:
        """The results of a batch. :raises Refused: the server would have."""
        known = _asked_of_catalog(self, self._engine, batch)
        if known is not None:
            yield known
            return
        for words in statements_of(batch):
            try:
                found = self._statement(words)
            except sqlite3.IntegrityError as error:
                raise Refused(2627, f"Violation of PRIMARY KEY constraint: {error}") from None
            except sqlite3.OperationalError as error:
                raise Refused(1205 if "locked" in str(error) else 102, f"{error}: {' '.join(words)[:200]}") from None
            if found is not None:
                yield found

    def _statement(self, words: list[str]) -> Rows | None:
        upper = [word.upper() for word in words]
        engine, connection = self._engine, self._connection
        match upper:
            case ["SET", "TRANSACTION", "ISOLATION", "LEVEL", level, *_]:
                self._is_snapshot = level == "SNAPSHOT"
            case ["SET" | "USE", *_]:
                pass
            case ["IF", "@@TRANCOUNT", *_] | ["ROLLBACK", *_]:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            case ["BEGIN", "TRAN" | "TRANSACTION", *_]:
                if self._is_snapshot and not engine.allows_snapshots:
                    raise Refused(3952, "Snapshot isolation transaction failed accessing database.")
                connection.execute("BEGIN" if self._is_snapshot else "BEGIN IMMEDIATE")
            case ["COMMIT", *_]:
                engine.commit(connection)
            case ["CREATE", "SCHEMA", *_]:
                pass
            case ["CREATE", "TABLE", *_]:
                schema, name, rest = _named(words[2:])
                with self._writing():
                    engine.create(connection, schema, name, rest[1 : closing(rest, 0)])
            case ["DROP", "TABLE", *_]:
                with self._writing():
                    engine.drop(connection, *_named(words[2:])[:2])
            case ["ALTER", "TABLE", *_]:
                schema, name, rest = _named(words[2:])
                with self._writing():
                    engine.alter(connection, schema, name, rest, " ".join(words))
            case ["ALTER", "DATABASE", _, "SET", "ALLOW_SNAPSHOT_ISOLATION", value]:
                engine.allows_snapshots = value == "ON"
            case ["EXEC", *_]:
                self._procedure(words[1:])
            case ["INSERT" | "UPDATE" | "DELETE", *_]:
                with self._writing():
                    connection.execute(to_sqlite(words, self._stored))
            case _:
                return self._select(words)
        return None

    def _writing(self) -> _Writing:
        return _Writing(self._engine, self._connection)

    def _stored(self, schema: str, name: str) -> str | None:
        try:
            return self._engine.table(schema, name).stored
        except Refused:
            if schema in ("sys", "cdc", "j", "dbo", "shop"):
                raise
            return None

    def _procedure(self, words: Sequence[str]) -> None:
        name = words[2].lower() if words[1] == "." else words[0].lower()
        given: dict[str, str] = {}
        for place, word in enumerate(words):
            if word.startswith("@") and words[place + 1] == "=":
                given[word[1:].lower()] = words[place + 2]
        texts = {key: text_of(value) if "'" in value else value for key, value in given.items()}
        engine = self._engine
        if name == "sp_cdc_enable_db":
            engine.has_cdc = True
        elif name == "sp_cdc_enable_table":
            engine.enable(
                texts["source_schema"],
                texts["source_name"],
                texts.get("capture_instance"),
                texts.get("captured_column_list"),
            )
        elif name == "sp_cdc_disable_table":
            engine.disable(texts["source_schema"], texts["source_name"], texts["capture_instance"])
        elif name == "sp_cdc_cleanup_change_table":
            low = int(texts["low_water_mark"], 16)
            for instance in engine.instances:
                if instance.name == texts["capture_instance"]:
                    instance.start = max(instance.start, low)
        elif not name.startswith("sp_cdc_"):
            raise Refused(2812, f"Could not find stored procedure '{name}'.")

    def _select(self, words: list[str]) -> Rows:
        text = " ".join(words)
        called = re.search(r"cdc \. (\[[^\]]+_CT\]) WHERE \S+ BETWEEN (0x\w+) AND (0x\w+)", text)
        if called is not None:
            self._make_changes(name_of(called[1]), called[2], called[3])
            text = text[: called.start()] + "changes_" + text[called.end() :]
            words = text.replace("sys . fn_cdc_is_bit_set", "FN_CDC_IS_BIT_SET_").split(" ")
            words = [word for statement in statements_of(" ".join(words)) for word in statement]
        cursor = self._connection.execute(to_sqlite(words, self._stored))
        names = [column[0] for column in cursor.description]
        return names, [list(row) for row in cursor.fetchall()]

    def _make_changes(self, named: str, first: str, last: str) -> None:
        instance, rows = self._engine.changes(self._connection, named, int(first, 16), int(last, 16))
        log = ("start_lsn", "seqval", "operation", "command_id", "update_mask")
        names = [*(f"__${name}" for name in log), *(column.name for column in instance.columns)]
        quoted = ", ".join(f'"{name}"' for name in names)
        self._connection.execute("DROP TABLE IF EXISTS temp.changes_")
        self._connection.execute(f"CREATE TEMP TABLE changes_ ({quoted})")
        marks = ", ".join("?" * len(names))
        self._connection.executemany(f"INSERT INTO temp.changes_ VALUES ({marks})", rows)

    def require(self, right: str) -> None:
        if right not in self._rights:
            raise Refused(300, "VIEW DATABASE STATE permission was denied.")


class _Writing:
    """A transaction around one statement, where none is open."""

    def __init__(self, engine: Engine, connection: sqlite3.Connection) -> None:
        self._engine, self._connection = engine, connection
        self._is_own = False

    def __enter__(self) -> None:
        self._is_own = not self._connection.in_transaction
        if self._is_own:
            self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if not self._is_own:
            return
        if failure is None:
            self._engine.commit(self._connection)
        elif self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def _named(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """Schema, table, and what follows."""
    if len(words) > 2 and words[1] == ".":
        return name_of(words[0]), name_of(words[2]), list(words[3:])
    return "dbo", name_of(words[0]), list(words[1:])


def _lsn(value: int | None) -> bytes | None:
    return None if value is None else value.to_bytes(10, "big")


def _asked_of_catalog(session: DoubleSession, engine: Engine, text: str) -> Rows | None:
    """The answers to questions about the server and its catalog: each by the words that only it has."""
    for mark, answer in _ANSWERS:
        if mark in text:
            with engine.lock:
                rows = answer(session, engine, text)
            if not rows:
                return re.findall(r" AS (\w+)(?:,|\s+FROM|\n)", text) or ["none"], []
            return list(rows[0]), [list(row.values()) for row in rows]
    return None


def _wanted(engine: Engine, text: str) -> Iterator[Any]:
    names = re.findall(r"s\.name = N'((?:[^']|'')*)' AND t\.name = N'((?:[^']|'')*)'", text)
    folded = {(schema.replace("''", "'").lower(), name.replace("''", "'").lower()) for schema, name in names}
    for table in engine.tables.values():
        if (table.schema.lower(), table.name.lower()) in folded:
            yield table


def _server(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    return [
        {
            "version": engine.version,
            "edition": "Double of the tests",
            "name": engine.name,
            "cdc": engine.has_cdc,
            "snapshots": int(engine.allows_snapshots),
            "versions": False,
            "level": engine.level,
            "broker": engine.broker,
        }
    ]


def _fork(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    return [{"fork": engine.fork}]


def _longest(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    return [{"longest": 65536}]


def _names(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    return [{"namespace": schema, "name": name} for schema, name in sorted(engine.tables)]


def _columns(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    found = []
    for table in _wanted(engine, text):
        tracked = any(instance.table is table for instance in engine.instances)
        for column in table.columns:
            length, digits, scale = column.sizes
            found.append(
                {
                    "namespace": table.schema,
                    "name": table.name,
                    "id": table.number,
                    "tracked": tracked,
                    "in_memory": False,
                    "column_id": column.number,
                    "column_name": column.name,
                    "type_name": parse_type(column.kind)[0],
                    "max_length": length,
                    "digits": digits,
                    "scale": scale,
                    "nullable": column.nullable,
                    "computed": column.computed is not None,
                    "collation_name": column.collation,
                    "default_definition": None if column.default is None else f"({column.default})",
                }
            )
    return found


def _keys(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    return [
        {
            "namespace": table.schema,
            "name": table.name,
            "index_name": f"PK_{table.name}",
            "is_primary": True,
            "column_name": name,
            "nullable": False,
            "computed": False,
        }
        for table in _wanted(engine, text)
        for name in table.key
    ]


def _sizes(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    found = re.search(r"p\.object_id = (\d+)", text)
    assert found is not None
    (table,) = [table for table in engine.tables.values() if table.number == int(found[1])]
    rows = session._connection.execute(f'SELECT COUNT(*) FROM "{table.stored}"').fetchone()[0]
    return [{"table_rows": rows, "size": rows * 100}]


def _instances(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    _require_cdc(engine)
    found = re.search(r"source_object_id IN \(([\d, ]+)\)", text)
    assert found is not None
    wanted = {int(one) for one in found[1].split(",")}
    rows = []
    for instance in sorted(engine.instances, key=lambda one: (one.table.number, one.number)):
        for column in instance.columns if instance.table.number in wanted else ():
            length, digits, scale = column.sizes
            kind = parse_type(column.kind)[0]
            if kind in ("timestamp", "rowversion"):
                kind, length = "binary", 8
            rows.append(
                {
                    "instance": instance.name,
                    "id": instance.table.number,
                    "start_lsn": None if instance.is_being_made else _lsn(instance.start),
                    "min_lsn": _lsn(0 if engine.is_gated else instance.start),
                    "column_name": column.name,
                    "column_id": column.number,
                    "computed": column.computed is not None,
                    "type_name": kind,
                    "max_length": length,
                    "digits": digits,
                    "scale": scale,
                    "change_id": instance.number,
                    "role_name": "readers" if engine.is_gated else None,
                    "change_table": f"{instance.name}_CT",
                    "command_size": 4,
                }
            )
    return rows


def _require_cdc(engine: Engine) -> None:
    if not engine.has_cdc:
        raise Refused(208, "Invalid object name 'cdc.change_tables'.")


def _max(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    _require_cdc(engine)
    starts = [instance.start for instance in engine.instances]
    return [{"max_lsn": _lsn(engine.max_lsn), "start_lsn": _lsn(max(starts, default=0) or None)}]


def _commits(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    _require_cdc(engine)
    told = re.search(r"m\.start_lsn > (0x\w+) AND", text)
    place = re.search(r"m\.start_lsn > (0x\w+) OR m\.tran_id <> 0x00", text)
    most = re.search(r"TOP \((\d+)\)", text)
    assert told is not None
    assert place is not None
    assert most is not None
    found = [
        one
        for one in engine.commits
        if int(told[1], 16) < one.lsn <= engine.scanned and (one.has_changes or one.lsn > int(place[1], 16))
    ]
    now = engine.minutes(engine.zone, dt.datetime.now(dt.UTC))
    return [
        {"lsn": _lsn(one.lsn), "local_us": engine.local_us(one.time), "now_minutes": now}
        for one in found[: int(most[1])]
    ]


def _zone(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    if not engine.says_zone:
        raise Refused(195, "'CURRENT_TIMEZONE_ID' is not a recognized built-in function name.")
    return [{"zone": engine.zone}]


def _zone_now(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    now = dt.datetime.now(dt.UTC)
    return [{"own": engine.minutes(engine.zone, now), "of_zone": engine.minutes(_zone_in(text), now)}]


def _offsets(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    zone = _zone_in(text)
    return [
        {"n": int(n), "minutes": engine.minutes(zone, dt.datetime.fromisoformat(instant).replace(tzinfo=dt.UTC))}
        for n, instant in re.findall(r"\((\d+), '([^']+)'\)", text)
    ]


def _zone_in(text: str) -> str:
    return str(re.findall(r"AT TIME ZONE N'([^']+)'", text)[-1])


def _fell(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    begin, end = (
        round(dt.datetime.fromisoformat(one).replace(tzinfo=dt.UTC).timestamp() * 1e6)
        for one in re.findall(r"CONVERT\(datetime, '([^']+)', 126\)", text)
    )
    found = re.search(r"w\.fell > (\d+)", text)
    assert found is not None
    times = [(one.lsn, engine.local_us(one.time)) for one in engine.commits if one.lsn <= engine.scanned]
    inside = [(lsn, local_us) for lsn, local_us in times if begin <= local_us < end]
    falls = [lsn for (_, was), (lsn, now) in pairwise(inside) if was - now > int(found[1]) * 1_000_000]
    return [{"lsn": _lsn(lsn)} for lsn in falls[:1]]


def _came(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    named = re.search(r"capture_instance = N'([^']+)'", text)
    assert named is not None
    before = re.search(r"h\.ddl_lsn < (0x\w+)", text)
    assert before is not None
    return [
        {"ddl_lsn": _lsn(lsn), "ddl_command": statement}
        for instance in engine.instances
        if instance.name == named[1]
        for lsn, statement in instance.alterations
        if lsn < int(before[1], 16)
    ]


def _log_end(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    session.require("state")
    digits = f"{engine.log_end:020X}"
    return [{"log_end": f"{digits[:8]}:{digits[8:16]}:{digits[16:]}"}]


def _scan(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    session.require("state")
    return [{"id": engine.scan_session, "empty": engine.empty_scans, "failures": engine.failures}]


def _holds(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    return [{"has_replicas": int(engine.hardened is not None), "waits_for_backup": int(engine.waits_for_backup)}]


def _hardened(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    session.require("server state")
    assert engine.hardened is not None
    file, block, record = engine.hardened >> 48, engine.hardened >> 16 & 0xFFFFFFFF, engine.hardened & 0xFFFF
    return [{"replicas": 1, "known": 1, "hardened": f"{file}{block:010}{record:05}"}]


def _named_in(engine: Engine, text: str) -> Iterator[Any]:
    found = re.search(r"_id IN \(([\d, ]+)\)", text)
    assert found is not None
    wanted = {int(one) for one in found[1].split(",")}
    return (table for table in engine.tables.values() if table.number in wanted)


def _masked(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    return [
        {
            "id": table.number,
            "column_name": engine.masked[table.name],
            "unmasks": int("server state" in session._rights),
        }
        for table in _named_in(engine, text)
        if table.name in engine.masked
    ]


def _policies(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    return [
        {"id": table.number, "policy": engine.policies[table.name]}
        for table in _named_in(engine, text)
        if table.name in engine.policies
    ]


def _switched(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    return [
        {"id": table.number, "instance": f"{table.schema}_{table.name}"}
        for table in _named_in(engine, text)
        if table.name in engine.switched
    ]


def _polls(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    return [{"seconds": engine.polls}]


def _agent(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    session.require("state")
    return [{"status": 4 if engine.agent_runs else 1}]


def _jobs(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    capture = {"job": "capture", "polls": engine.polls, "retention": 0, "continuous": True}
    return [capture, {"job": "cleanup", "polls": 0, "retention": 4320, "continuous": False}]


def _ranked(session: DoubleSession, engine: Engine, text: str) -> list[dict[str, Any]]:
    sent = re.search(r"OPENJSON\((N'(?:[^']|'')*')\)", text)
    kind = re.search(r"ORDER BY CONVERT\((\w+(?:\([\w, ]+\))?),", text)
    assert sent is not None
    assert kind is not None
    texts = json.loads(text_of(sent[1]))
    style = 2 if kind[1].startswith("varbinary") else None
    ranks = [rank(kind[1], converted(kind[1], value, style)) for value in texts]
    ordered = sorted(set(ranks))
    return [{"n": number, "place": ordered.index(one) + 1} for number, one in enumerate(ranks)]


_ANSWERS = (
    ("'IsSyncWithBackup'", _holds),
    ("sys.dm_hadr_database_replica_states", _hardened),
    ("FROM sys.masked_columns AS c", _masked),
    ("FROM sys.security_predicates AS p", _policies),
    ("i.partition_switch = 1", _switched),
    ("FROM sys.databases AS d", _server),
    ("FROM sys.database_recovery_status AS r", _fork),
    ("FROM sys.configurations AS c", _longest),
    ("t.is_ms_shipped = 0", _names),
    ("JOIN sys.indexes AS i", _keys),
    ("LEFT JOIN sys.default_constraints", _columns),
    ("sys.dm_db_partition_stats", _sizes),
    ("JOIN cdc.captured_columns AS k", _instances),
    ("AS fell", _fell),
    ("FROM cdc.lsn_time_mapping AS m", _commits),
    ("CURRENT_TIMEZONE_ID()", _zone),
    ("AS of_zone", _zone_now),
    ("AS v (n, t)", _offsets),
    ("SELECT sys.fn_cdc_get_max_lsn() AS max_lsn", _max),
    ("FROM cdc.ddl_history AS h", _came),
    ("FROM sys.dm_db_log_stats", _log_end),
    ("sys.dm_cdc_log_scan_sessions", _scan),
    ("sys.dm_server_services", _agent),
    ("j.job_type = N'capture'", _polls),
    ("msdb.dbo.cdc_jobs", _jobs),
    ("FROM OPENJSON(", _ranked),
)
