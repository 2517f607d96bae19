"""The order of keys: what is computed here is what ``ORDER BY`` gives, for every type; the rest is asked."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import pyarrow as pa
import pytest
from psycopg.errors import FeatureNotSupported
from tests.db.postgres.test_snapshot import described
from tests.servers.postgres import Database

from headwater.sources.postgres.connection import Dsn, connect
from headwater.sources.postgres.csv import read_csv, read_texts
from headwater.sources.postgres.key_order import PostgresKeyOrder
from headwater.sources.postgres.snapshots import PostgresSnapshots
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceTable

TEXTS = (
    "", " ", "  ", "a", "A", "a ", "a  ", "ab", "aB", "Ab", "AB", "b", "B", "ä", "Ä", "z", "Z", "é", "e", "f", "E", "É",
    "a-b", "a b", "ab-", "_a", "1", "10", "2", "ß", "ss", "\u00e4", "a\u0308", "𝄞", "\uffff", "\ue000", "\x01", "\x7f",
    "co-op", "coop", "CO-OP", "'", '"', "\\", ",", "{}", "NULL", "\t", "\n", "ı", "i", "I", "İ", "日本", "中国",
)  # fmt: skip
NUMBERS = ("0", "1", "-1", "10", "9", "-10", "100", "127", "-128", "255", "2", "32767", "-32768")
MOMENTS = (
    "0001-01-01", "1969-12-31", "1970-01-01", "2000-02-29", "9999-12-31", "1582-10-10", "2024-01-01", "2023-12-31",
)  # fmt: skip
KINDS: dict[str, tuple[Sequence[str], bool]] = {
    "smallint": (NUMBERS, True),
    "integer": ((*NUMBERS, "2147483647", "-2147483648"), True),
    "bigint": ((*NUMBERS, "9223372036854775807", "-9223372036854775808", "9007199254740993"), True),
    "oid": (("0", "1", "2147483648", "4294967295", "9"), True),
    "numeric(10,2)": ((*NUMBERS, "0.01", "-0.01", "99999999.99", "-99999999.99", "1.10"), True),
    "numeric(38,10)": ((*NUMBERS, "1e27", "-1e27", "0.0000000001", "-0.0000000001", "18446744073709551616"), True),
    "numeric(76,10)": ((*NUMBERS, "1e65", "-1e65", "1e27", "-1e27", "0.0000000001", "1e40", "-1e40"), True),
    "numeric": ((*NUMBERS, "1e100", "-1e100", "NaN", "Infinity", "-Infinity", "1e-100", "9.99"), False),
    "real": ((*NUMBERS, "NaN", "Infinity", "-Infinity", "1e-40", "-1e-40", "1.5", "3e38"), True),
    "double precision": ((*NUMBERS, "NaN", "Infinity", "-Infinity", "1e-320", "-1e-320", "1e308", "0.1"), True),
    "boolean": (("t", "f"), True),
    "date": (MOMENTS, True),
    "time": (("00:00:00", "23:59:59.999999", "12:00", "00:00:00.000001"), True),
    "timestamp": ((*MOMENTS, "1969-12-31 23:59:59.999999", "2024-01-01 12:00:00.1"), True),
    "timestamptz": ((*MOMENTS[1:4], "2024-01-01 00:00:00+05", "2024-01-01 00:00:00-05", "2024-01-01 00:00Z"), True),
    "uuid": (
        tuple(
            f"{prefix}{'0' * (32 - len(prefix))}"
            for prefix in ("", "0f", "f0", "7f", "80", "ff", "a", "9", "00000000000000000001", "00001")
        ),
        True,
    ),
    "bytea": ((r"\x", r"\x00", r"\x0000", r"\x01", r"\xff", r"\x7f", r"\x80", r"\x00ff", r"\xff00", r"\x61"), True),
    'text COLLATE "C"': (TEXTS, True),
    'text COLLATE "POSIX"': (TEXTS, True),
    'text COLLATE "ucs_basic"': (TEXTS, True),
    'varchar(40) COLLATE "C"': (TEXTS, True),
    "text": (TEXTS, True),  # the database of the tests has the locale C
    "name": (tuple(text for text in TEXTS if text), True),
    'text COLLATE "en-x-icu"': (TEXTS, False),
    'text COLLATE "de-x-icu"': (TEXTS, False),
    "text COLLATE public.no_case": (tuple({text.lower(): text for text in TEXTS}.values()), False),
    "char(8)": (tuple({text.rstrip(" "): text for text in TEXTS}.values()), False),
    '"char"': (("a", "b", "A", "", "~", "1"), False),
    "mood": (("sad", "ok", "very happy", "Angry", "zz", "größe"), False),
    "inet": (("10.0.0.1", "9.0.0.1", "10.0.0.0/8", "::1", "ffff::", "10.0.0.1/32", "192.168.0.0/16"), False),
    "cidr": (("10.0.0.0/8", "9.0.0.0/8", "10.0.0.0/16", "::/0", "0.0.0.0/0"), False),
    "macaddr": (("08:00:2b:01:02:03", "08:00:2b:01:02:04", "ff:00:00:00:00:00"), False),
    "interval": (("1 day", "2 hours", "1 mon", "-1 day", "30 days 00:00:01", "1 year", "0"), False),
    "int4range": (("empty", "[1,5)", "[1,)", "(,5)", "[2,3)", "(,)", "[1,2)"), False),
    "timetz": (("00:00+00", "00:00+01", "00:00-01", "23:59:59+14"), False),
    "bit(4)": (("0000", "0001", "1000", "1111"), False),
    "varbit": (("0", "00", "1", "01", "10", "11"), False),
    "money": (("1", "-1", "10.5", "9", "0"), False),
    "pg_lsn": (("0/0", "0/A", "0/9", "1/0", "A/0"), False),
    "jsonb": (('{"a": 1}', "[]", "1", "2", '"a"', "null", "true", '{"b": 1, "a": 1}'), False),
    "tsvector": (("a", "b", "a b", "a:1"), False),
    "regclass": (("pg_class", "pg_type", "pg_proc"), False),
    "small_number": (NUMBERS, True),
    "c_text": (TEXTS[1:], True),
    "icu_text": (TEXTS, False),
    "pair": (("(1,a)", "(1,b)", "(0,z)", "(1,A)", "(,a)", "(1,)"), False),
}
SETUP = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'zz', 'very happy', 'größe')",
    "ALTER TYPE mood ADD VALUE 'Angry' BEFORE 'ok'",
    "CREATE DOMAIN small_number AS integer CHECK (VALUE < 100000)",
    "CREATE DOMAIN c_text AS text COLLATE \"C\" CHECK (VALUE <> '')",
    "CREATE TYPE pair AS (a int, b text)",
)
ICU_SETUP = (
    "CREATE COLLATION no_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
    'CREATE DOMAIN icu_text AS text COLLATE "en-x-icu"',
)


@pytest.fixture
def prepared(postgres: Database) -> Iterator[Prepared]:
    with closing(Prepared(postgres)) as prepared:
        yield prepared


class Prepared:
    """A database with types of its own."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.source = PostgresSnapshots(database.dsn)
        self.session = connect(Dsn(database.dsn))
        database.execute(*SETUP)
        self.has_icu = bool(database.value("SELECT count(*) FROM pg_collation WHERE collname = 'en-x-icu'"))
        if self.has_icu:
            database.execute(*ICU_SETUP)

    def close(self) -> None:
        self.session.close()

    def has(self, kinds: Sequence[str]) -> bool:
        return self.has_icu or not any("icu" in kind or "no_case" in kind for kind in kinds)

    def check(self, kinds: Sequence[str], rows: Sequence[Sequence[str]], *, local: bool) -> None:
        """Cuts at every key, before and after, and at some: keys lie where the server's own order has them."""
        names = [f"k{place}" for place in range(len(kinds))]
        table = self._filled(names, kinds, rows)
        order: PostgresKeyOrder = pickle.loads(pickle.dumps(self.source.order(table)))
        assert order.is_local is local
        listed = ", ".join(names)
        with self.session.cursor().copy(
            f"COPY (SELECT * FROM public.t ORDER BY {listed}) TO STDOUT (FORMAT csv)".encode()
        ) as copy:
            data = b"".join(bytes(block) for block in copy)
        (in_order,) = read_csv(table, data)
        texts = read_texts("t", data, len(kinds)).to_pydict()
        values = list(zip(*texts.values(), strict=True))
        with self.source.export() as snapshot:
            plan = snapshot.plan(table, split_rows=1, kind=SplitKind.KEY)
            assert [split.range.start and split.range.start.values for split in plan.splits[1:-1]] == values
            middle = plan.splits[len(plan.splits) // 2]
            (batch,) = self.source.read(table, SplitKind.KEY, middle.range, snapshot.name)
            assert batch.equals(in_order.slice(middle.number - 1, 1))
            prefixes = [Cut(value[:-1], after) for value in values[::20] for after in (False, True) if len(value) > 1]
            counts = [self._before(table, cut, snapshot.name) for cut in prefixes]
        mixed = random.Random(1).sample(range(len(values)), len(values))
        shuffled = in_order.take(pa.array(mixed))
        both = tuple(Cut(value, after) for value in values for after in (False, True))
        assert order.places(shuffled, both).tolist() == [2 * place + 1 for place in mixed]
        expected = [sum(2 * place + 1 > number for number in range(1, len(both), 3)) for place in mixed]
        assert order.places(shuffled, both[1::3]).tolist() == expected
        assert order.places(shuffled, ()).tolist() == [0] * len(mixed)
        assert order.places(shuffled.slice(0, 0), both).tolist() == []
        assert [int((order.places(shuffled, [cut]) == 0).sum()) for cut in prefixes] == counts

    def _filled(self, names: Sequence[str], kinds: Sequence[str], rows: Sequence[Sequence[str]]) -> SourceTable:
        """A table whose primary key is all its columns."""
        declared = ", ".join(f"{column} {kind}" for column, kind in zip(names, kinds, strict=True))
        casts = ", ".join(f"%s::text::{kind.partition(' COLLATE')[0]}" for kind in kinds)
        with self.database.connect() as session:
            session.execute("DROP TABLE IF EXISTS t")
            session.execute(f"CREATE TABLE t ({declared}, PRIMARY KEY ({', '.join(names)}))".encode())
            session.cursor().executemany(
                f"INSERT INTO t VALUES ({casts}) ON CONFLICT DO NOTHING".encode(), [list(row) for row in rows]
            )
        return described(self.database, "t")

    def _before(self, table: SourceTable, cut: Cut, snapshot: str) -> int:
        return sum(batch.num_rows for batch in self.source.read(table, SplitKind.KEY, KeyRange(None, cut), snapshot))


def test_m17_keys_of_every_type_lie_where_the_server_has_them(prepared: Prepared) -> None:
    for kind, (values, local) in KINDS.items():
        if prepared.has([kind]):
            prepared.check([kind], [[value] for value in values], local=local)


def test_keys_of_several_columns(prepared: Prepared) -> None:
    chance = random.Random(7)
    for kinds in (
        ["integer", 'text COLLATE "C"'],
        ['text COLLATE "C"', "bigint"],
        ["numeric(38,10)", "uuid", "boolean"],
        ["double precision", "bytea", "date", "smallint"],
        ["mood", "integer"],
        ["integer", 'text COLLATE "en-x-icu"', "numeric"],
    ):
        if prepared.has(kinds):
            rows = [[chance.choice(KINDS[kind][0][:6]) for kind in kinds] for _ in range(60)]
            prepared.check(kinds, rows, local=all(KINDS[kind][1] for kind in kinds))


def test_many_keys_are_asked_for_at_once_and_over_a_new_connection_when_it_broke(newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id char(32) PRIMARY KEY)", "INSERT INTO t SELECT md5(i::text) FROM generate_series(1, 50000) i"
    )
    source, table = PostgresSnapshots(newest_postgres.dsn), described(newest_postgres, "t")
    with source.export() as snapshot:
        plan = snapshot.plan(table, split_rows=500, kind=SplitKind.KEY)
    order, cuts = source.order(table), [split.range.start for split in plan.splits[1:] if split.range.start]
    keys = next(source.read(table, SplitKind.KEY, KeyRange(), None))
    assert not order.is_local
    first = order.places(keys, cuts)
    assert np.bincount(first).tolist() == [0, *[500] * 100]
    newest_postgres.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'headwater'"
        " AND datname = current_database()"
    )
    assert (order.places(keys, cuts) == first).all()


def test_keys_of_an_extension_are_compared_by_its_operators(postgres: Database) -> None:
    try:
        postgres.execute("CREATE SCHEMA ext", "CREATE EXTENSION citext SCHEMA ext")
    except FeatureNotSupported:
        pytest.skip("this build has no citext")
    with closing(Prepared(postgres)) as prepared:
        values = tuple({text.lower(): text for text in TEXTS}.values())
        prepared.check(["ext.citext"], [[value] for value in values], local=False)
        rows = [[value, number] for value in values[:9] for number in ("1", "2")]
        prepared.check(["ext.citext", "integer"], rows, local=False)
        prepared.check(["integer", "ext.citext"], [row[::-1] for row in rows], local=False)
