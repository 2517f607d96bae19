"""The statements of the fuzzer for Postgres."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from tests.fuzz.script import BEGIN, COMMIT, FIRST_ROWS, Builder, Column, Step, Type

WORDS: Final = ("", "a", "null", "O''Brien", "zwölf", "日本", "a,b", "{x}", " blank ", "NULL", "line\nline", "100%")


def _word(rng: Random) -> str:
    if rng.random() < 0.05:  # kept out of line, and not sent again by an update that leaves it as it is
        first = rng.randrange(1000)
        return f"(SELECT string_agg(md5(g::text), '') FROM generate_series({first}, {first + 150}) g)"
    return f"'{rng.choice(WORDS)}{rng.choice(['', rng.randrange(1000)])}'"


def _integer(bits: int) -> Type:
    name = {16: "smallint", 32: "integer", 64: "bigint"}[bits]

    def literal(rng: Random) -> str:
        return str(rng.choice([0, 1, -1, rng.randrange(1000), (1 << (bits - 2)) - 1, -(1 << (bits - 2))]))

    return Type(name, "integer", literal)


def _numeric(digits: int, scale: int) -> Type:
    def literal(rng: Random) -> str:
        return f"{rng.randrange(-(10**5), 10**5)}.{rng.randrange(10**scale):0{scale}d}" if scale else "7"

    return Type(f"numeric({digits},{scale})", "numeric", literal)


def _date(rng: Random) -> str:
    return f"{rng.randrange(1900, 2100)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"


def _time(rng: Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}.{rng.randrange(10**6):06}"


def _moment(sql: str) -> Type:
    return Type(sql, "moment", lambda rng: f"'{_date(rng)} {_time(rng)}'")


def _fixed(sql: str, *values: str) -> Type:
    return Type(sql, "other", lambda rng: rng.choice(values))


SMALLINT, INTEGER, BIGINT = _integer(16), _integer(32), _integer(64)
REAL: Final = Type("real", "float", lambda rng: rng.choice(["0", "1.5", "-2.25", "'NaN'", "3.4e10", "0.1"]))
DOUBLE: Final = Type("double precision", "float", lambda rng: rng.choice(["0", "0.1", "-1e300", "'Infinity'", "1e-9"]))
NUMERIC: Final = Type("numeric", "unbounded", lambda rng: rng.choice(["0.10", "1e30", "-7", "123456789.000000001"]))
TEXT: Final = Type("text", "text", _word)
TIMESTAMP, TIMESTAMPTZ = _moment("timestamp"), _moment("timestamptz")
JSON: Final = Type("json", "json", lambda rng: rng.choice(['\'{"b": 1,  "a": [1,2]}\'', "'null'", "'\"x\"'", "'[]'"]))
JSONB: Final = replace(JSON, sql="jsonb", family="jsonb")
VARCHAR: Final = Type("varchar(20)", "varchar", lambda rng: f"'{rng.choice(WORDS)}'")
CHAR: Final = Type("char(12)", "char", lambda rng: f"'{rng.choice(WORDS)}'")
PLAIN: Final = (
    *(SMALLINT, INTEGER, BIGINT, REAL, DOUBLE, NUMERIC, TEXT, TIMESTAMP, TIMESTAMPTZ, JSON, JSONB, VARCHAR, CHAR),
    _numeric(10, 4),
    _numeric(12, 2),
    _moment("timestamp(3)"),
    Type("boolean", "other", lambda rng: rng.choice(["true", "false"])),
    Type("date", "other", lambda rng: f"'{_date(rng)}'"),
    Type("time", "other", lambda rng: f"'{_time(rng)}'"),
    Type("uuid", "other", lambda rng: f"'{rng.getrandbits(128):032x}'"),
    Type("bytea", "other", lambda rng: f"'\\x{rng.randbytes(rng.choice([0, 1, 9])).hex()}'"),
    Type("integer[]", "other", lambda rng: rng.choice(["'{}'", "'{1,NULL,3}'", "ARRAY[4]"])),
    Type("text[]", "other", lambda rng: rng.choice(["'{}'", "ARRAY['a','b,c',NULL]", "ARRAY['']"])),
    _fixed("interval", "'1 day'", "'-3 mons 04:05:06'"),
    _fixed("inet", "'10.0.0.1'", "'::1/64'"),
    _fixed("int4range", "'[1,5)'", "'empty'"),
    _fixed("bit(5)", "B'10101'", "B'00000'"),
    _fixed("point", "'(1,2)'"),
)
SIMPLE: Final = (INTEGER, BIGINT, TEXT, _numeric(12, 2), TIMESTAMP, DOUBLE)
"""Types that have a constant to add a column with."""
WIDER: Final = {
    "smallint": (INTEGER, BIGINT),
    "integer": (BIGINT,),
    "real": (DOUBLE,),
    "varchar(20)": (replace(VARCHAR, sql="varchar(40)"), TEXT),
    "numeric(10,4)": (_numeric(14, 4),),
    "numeric(12,2)": (_numeric(16, 2),),
}
DATA: Final = {"insert": 8, "update": 9, "delete": 3, "update_key": 2, "truncate": 1}
SCHEMA: Final = {
    "add_nullable": 4,
    "drop_column": 3,
    "rename_column": 4,
    "widen": 3,
    "drop_add_one": 2,
    "drop_add_two": 2,
    "swap_names": 2,
    "rename_chain": 2,
    "add_default": 2,
    "add_volatile": 2,
    "add_serial": 1,
    "add_identity": 1,
    "add_not_null": 2,
    "add_generated": 1,
    "add_default_rename": 1,
    "set_default": 1,
    "set_not_null": 1,
    "type_using": 2,
    "fewer_digits": 2,
    "to_text": 1,
    "to_numeric": 1,
    "json_to_jsonb": 1,
    "enum_rename_value": 1,
    "enum_add_value": 1,
    "composite_add_attribute": 1,
    "table_swap": 1,
    "drop_create": 1,
    "attach_partition": 1,
    "detach_partition": 1,
    "truncate_leaf": 1,
    "key_change": 1,
    "rename_key": 1,
    "replica_identity": 1,
    "vacuum_full": 1,
    "cluster": 1,
    "analyze": 1,
}


@dataclass
class PostgresBuilder(Builder):
    """A script for Postgres. :ivar leaves: how many partitions it has; 0: it is a plain table."""

    leaves: int = 0
    labels: list[str] = field(default_factory=lambda: ["sad", "ok", "happy"])
    attributes: int = 2

    def __post_init__(self) -> None:
        self.data_weights, self.schema_weights = DATA, SCHEMA
        self.mood = Type("{t}_mood", "enum", lambda rng: f"'{rng.choice(self.labels)}'")
        self.pair = Type("{t}_pair", "composite", self._pair)

    def _pair(self, rng: Random) -> str:
        more = [str(rng.randrange(10)) for _ in range(self.attributes - 2)]
        return f"ROW({', '.join([str(rng.randrange(100)), _word_short(rng), *more])})::{{t}}_pair"

    def start(self) -> None:
        rng = self.rng
        types = [*rng.sample(PLAIN, rng.randint(2, 7)), *rng.sample([self.mood, self.pair], rng.choice([0, 0, 1, 2]))]
        self.columns = [Column(self.new_name(), one, not_null=rng.random() < 0.15) for one in types]
        self.create += [
            "CREATE TYPE {t}_mood AS ENUM ('sad', 'ok', 'happy')",
            "CREATE TYPE {t}_pair AS (a integer, b text)",
        ]
        is_parted = rng.random() < 0.15
        self.create.append(self._table("{t}", " PARTITION BY RANGE (id)" if is_parted else ""))
        if is_parted:
            self.leaves = 2
            self.create += [
                "CREATE TABLE {t}_p0 PARTITION OF {t} FOR VALUES FROM (MINVALUE) TO (25)",
                "CREATE TABLE {t}_p1 PARTITION OF {t} FOR VALUES FROM (25) TO (5000)",
            ]
        elif rng.random() < 0.15:
            self.create.append("ALTER TABLE {t} REPLICA IDENTITY FULL")
        rows = ", ".join(self.row(self.new_key(), self.columns) for _ in range(FIRST_ROWS))
        self.create.append(f"INSERT INTO {{t}} VALUES {rows}")

    def _table(self, name: str, more: str = "") -> str:
        shown = [f"{one.name} {one.type.sql}{' NOT NULL' if one.not_null else ''}" for one in self.columns]
        return f"CREATE TABLE {name} ({', '.join([f'{self.key} bigint PRIMARY KEY', *shown])}){more}"

    def ddl(self, name: str, *texts: str, whole: bool = False) -> None:
        """Statements of one kind: in a transaction, with rows before and after or not, or each in its own."""
        self.end_open()
        session = self.rng.randrange(3)
        inside = whole or self.rng.random() < 0.35
        steps = [Step(session, name, text) for text in texts]
        if inside:
            steps = [Step(session, "begin", BEGIN), *steps, Step(session, "commit", COMMIT)]
            if self.rng.random() < 0.5:
                steps.insert(1, Step(session, "delete", f"DELETE FROM {{t}} WHERE {self.key} = {self._old()}"))
        self.steps += steps

    def _old(self) -> int:
        return self.rng.randrange(1, self.keys + 1)

    def _alter(self, what: str) -> str:
        return f"ALTER TABLE {{t}} {what}"

    def truncate(self) -> None:
        self.schema("truncate", "TRUNCATE {t}")

    def add_nullable(self) -> None:
        made = Column(self.new_name(), self.rng.choice(PLAIN))
        self.ddl("add_nullable", self._alter(f"ADD COLUMN {made.name} {made.type.sql}"))
        self.columns.append(made)

    def drop_column(self) -> None:
        if (one := self.some()) is not None and len(self.columns) > 1 and not one.in_key:
            self.ddl("drop_column", self._alter(f"DROP COLUMN {one.name}"))
            self.changed(one, None)

    def rename_column(self) -> None:
        if (one := self.some()) is not None:
            new = replace(one, name=self.new_name())
            self.ddl("rename_column", self._alter(f"RENAME COLUMN {one.name} TO {new.name}"))
            self.changed(one, new)

    def widen(self) -> None:
        found = [one for one in self.columns if one.type.sql in WIDER]
        if found:
            one = self.rng.choice(found)
            new = replace(one, type=self.rng.choice(WIDER[one.type.sql]))
            self.ddl("widen", self._alter(f"ALTER COLUMN {one.name} TYPE {new.type.sql}"))
            self.changed(one, new)

    def drop_add_one(self) -> None:
        self._drop_add("drop_add_one", whole=True)

    def drop_add_two(self) -> None:
        self._drop_add("drop_add_two", whole=False)

    def _drop_add(self, name: str, *, whole: bool) -> None:
        one = self.some()
        if one is None or one.in_key:  # the server drops the key with it
            return
        new = Column(one.name, one.type if self.rng.random() < 0.5 else self.rng.choice(PLAIN))
        texts = [
            self._alter(f"DROP COLUMN {one.name}"),
            self._alter(f"ADD COLUMN {one.name} {new.type.sql}"),
        ]
        if whole:
            self.ddl(name, *texts, whole=True)
        else:
            self.schema(name, *texts)
        self.changed(one, new)

    def swap_names(self) -> None:
        if len(self.columns) < 2:
            return
        one, other = self.rng.sample(self.columns, 2)
        texts = [
            self._alter(f"RENAME COLUMN {one.name} TO {{c}}swapped"),
            self._alter(f"RENAME COLUMN {other.name} TO {one.name}"),
            self._alter(f"RENAME COLUMN {{c}}swapped TO {other.name}"),
        ]
        self.ddl("swap_names", *texts, whole=True)
        first, second = replace(one, name=other.name), replace(other, name=one.name)
        self.columns = [first if each is one else second if each is other else each for each in self.columns]

    def rename_chain(self) -> None:
        if len(self.columns) < 2:
            return
        one, other = self.rng.sample(self.columns, 2)
        away, moved = replace(one, name=self.new_name()), replace(other, name=one.name)
        self.ddl(
            "rename_chain",
            self._alter(f"RENAME COLUMN {one.name} TO {away.name}"),
            self._alter(f"RENAME COLUMN {other.name} TO {one.name}"),
        )
        self.columns = [away if each is one else moved if each is other else each for each in self.columns]

    def _add(self, name: str, type_: Type, more: str, **known: bool) -> Column:
        made = Column(self.new_name(), type_, **known)
        self.ddl(name, self._alter(f"ADD COLUMN {made.name} {type_.sql}{more}"))
        self.columns.append(made)
        return made

    def add_default(self) -> None:
        one = self.rng.choice(SIMPLE)
        self._add("add_default", one, f" DEFAULT {one.literal(self.rng)}" if one is not TEXT else " DEFAULT 'x'")

    def add_not_null(self) -> None:
        one = self.rng.choice(SIMPLE)
        value = one.literal(self.rng) if one is not TEXT else "''"
        self._add("add_not_null", one, f" NOT NULL DEFAULT {value}", not_null=True)

    def add_volatile(self) -> None:
        self._add("add_volatile", DOUBLE, " DEFAULT random()")

    def add_serial(self) -> None:
        self._add("add_serial", Type("serial", "serial", INTEGER.literal), "", not_null=True)

    def add_identity(self) -> None:
        self._add("add_identity", BIGINT, " GENERATED BY DEFAULT AS IDENTITY", not_null=True)

    def add_generated(self) -> None:
        made = Type("bigint", "generated", BIGINT.literal)
        self._add("add_generated", made, f" GENERATED ALWAYS AS ({self.key} * 2) STORED", written=False)

    def add_default_rename(self) -> None:
        one = self._add("add_default_rename", INTEGER, " DEFAULT 7")
        new = replace(one, name=self.new_name())
        self.schema("add_default_rename", self._alter(f"RENAME COLUMN {one.name} TO {new.name}"))
        self.changed(one, new)

    def set_default(self) -> None:
        if one := self.some("integer", "numeric", "float"):
            self.ddl("set_default", self._alter(f"ALTER COLUMN {one.name} SET DEFAULT 5"))

    def set_not_null(self) -> None:
        if one := self.some("integer", "numeric", "float"):
            text = f"UPDATE {{t}} SET {one.name} = 0 WHERE {one.name} IS NULL"
            self.ddl("set_not_null", text, self._alter(f"ALTER COLUMN {one.name} SET NOT NULL"))
            self.changed(one, replace(one, not_null=True))

    def _retype(self, name: str, one: Column, new: Type, using: str = "") -> None:
        text = f"ALTER COLUMN {one.name} TYPE {new.sql}" + (f" USING {using}" if using else "")
        self.ddl(name, self._alter(text))
        self.changed(one, replace(one, type=new))

    def type_using(self) -> None:
        if one := self.some("integer", "numeric", "float", "varchar", "text"):
            is_text = one.type.family in ("varchar", "text")
            using = f"left({one.name} || 'x', 20)" if is_text else f"{one.name} / 2"
            self._retype("type_using", one, one.type, using)

    def fewer_digits(self) -> None:
        if one := self.some("numeric", "moment"):
            if one.type.family == "moment":
                new = replace(one.type, sql="timestamptz(0)" if "tz" in one.type.sql else "timestamp(0)")
            else:
                new = _numeric(10, 1)
            self._retype("fewer_digits", one, new)

    def to_text(self) -> None:
        if one := self.some("integer", "char", "varchar", "numeric", "moment", "jsonb"):
            self._retype("to_text", one, TEXT, f"{one.name}::text")

    def to_numeric(self) -> None:
        if one := self.some("integer"):
            self._retype("to_numeric", one, NUMERIC)

    def json_to_jsonb(self) -> None:
        if one := self.some("json"):
            self._retype("json_to_jsonb", one, JSONB)

    def enum_rename_value(self) -> None:
        if self.some("enum") is None:
            return
        place = self.rng.randrange(len(self.labels))
        new = f"label{self.new_key()}"
        self.schema("enum_rename_value", f"ALTER TYPE {{t}}_mood RENAME VALUE '{self.labels[place]}' TO '{new}'")
        self.labels[place] = new

    def enum_add_value(self) -> None:
        if self.some("enum") is None:
            return
        new = f"label{self.new_key()}"
        where = self.rng.choice(["", f" BEFORE '{self.labels[0]}'"])
        self.schema("enum_add_value", f"ALTER TYPE {{t}}_mood ADD VALUE '{new}'{where}")
        self.labels.append(new)

    def composite_add_attribute(self) -> None:
        if self.some("composite") is None:
            return
        self.attributes += 1
        self.schema(
            "composite_add_attribute", f"ALTER TYPE {{t}}_pair ADD ATTRIBUTE a{self.attributes} integer CASCADE"
        )

    def table_swap(self) -> None:
        if self.leaves:
            return
        number = self.new_key()
        self.ddl(
            "table_swap",
            f"CREATE TABLE {{t}}_new{number} (LIKE {{t}} INCLUDING ALL)",
            f"INSERT INTO {{t}}_new{number} SELECT * FROM {{t}} WHERE {self.key} % 2 = 0",
            f"ALTER TABLE {{t}} RENAME TO {{t}}_old{number}",
            f"ALTER TABLE {{t}}_new{number} RENAME TO {{t}}",
            whole=True,
        )

    def drop_create(self) -> None:
        if self.leaves:
            return
        self.columns = [replace(one, written=True, in_key=False) for one in self.columns]
        keys = [self.new_key() for _ in range(5)]
        rows = ", ".join(self.row(key, self.columns) for key in keys)
        self.ddl("drop_create", "DROP TABLE {t}", self._table("{t}"), f"INSERT INTO {{t}} VALUES {rows}")

    def attach_partition(self) -> None:
        if not self.leaves:
            return
        low, self.leaves = 5000 * (self.leaves - 1), self.leaves + 1
        leaf = f"{{t}}_p{self.leaves - 1}"
        names = ", ".join([self.key, *(column.name for column in self.columns if column.written)])
        rows = ", ".join(self.row(low + n, [one for one in self.columns if one.written]) for n in range(4))
        self.schema(
            "attach_partition",
            f"CREATE TABLE {leaf} (LIKE {{t}} INCLUDING ALL)",
            f"INSERT INTO {leaf} ({names}) VALUES {rows}",
            f"ALTER TABLE {{t}} ATTACH PARTITION {leaf} FOR VALUES FROM ({low}) TO ({low + 5000})",
        )

    def detach_partition(self) -> None:
        if self.leaves > 1:
            self.schema(
                "detach_partition", f"ALTER TABLE {{t}} DETACH PARTITION {{t}}_p{self.rng.randrange(self.leaves)}"
            )

    def truncate_leaf(self) -> None:
        if self.leaves:
            self.schema("truncate_leaf", f"TRUNCATE {{t}}_p{self.rng.randrange(self.leaves)}")

    def key_change(self) -> None:
        if self.leaves:
            return
        one = Column(self.new_name(), INTEGER, not_null=True, in_key=True)
        self.columns = [replace(each, in_key=False) for each in self.columns]
        self.ddl(
            "key_change",
            self._alter(f"ADD COLUMN {one.name} integer NOT NULL DEFAULT 0"),
            self._alter("DROP CONSTRAINT {t}_pkey"),
            self._alter(f"ADD CONSTRAINT {{t}}_pkey PRIMARY KEY ({self.key}, {one.name})"),
            whole=True,
        )
        self.columns.append(one)

    def rename_key(self) -> None:
        new = self.new_name()
        self.ddl("rename_key", self._alter(f"RENAME COLUMN {self.key} TO {new}"))
        self.key = new

    def replica_identity(self) -> None:
        self.schema("replica_identity", self._alter(f"REPLICA IDENTITY {self.rng.choice(['FULL', 'DEFAULT'])}"))

    def vacuum_full(self) -> None:
        self.schema("vacuum_full", "VACUUM FULL {t}")

    def cluster(self) -> None:
        self.schema("cluster", "CLUSTER {t} USING {t}_pkey")

    def analyze(self) -> None:
        self.schema("analyze", "ANALYZE {t}")


def _word_short(rng: Random) -> str:
    return f"'{rng.choice(['x', 'y z', 'ß'])}'"
