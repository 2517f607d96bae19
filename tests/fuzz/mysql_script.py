"""The statements of the fuzzer for MariaDB and MySQL. Their schema changes commit by themselves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from tests.fuzz.script import FIRST_ROWS, Builder, Column, Type

WORDS: Final = ("", "a", "null", "O''Brien", "zwölf", "日本", "a,b", "{x}", " blank", "line\nline", "100%")


def _word(rng: Random) -> str:
    if rng.random() < 0.05:
        return f"REPEAT('{rng.randrange(10**9)}', 400)"
    return f"'{rng.choice(WORDS)}{rng.choice(['', rng.randrange(1000)])}'"


def _short(rng: Random) -> str:
    return f"'{rng.choice(WORDS)}'"


def _integer(sql: str, low: int, high: int) -> Type:
    return Type(sql, "integer", lambda rng: str(rng.choice([low, 0, 1, rng.randrange(100), high])))


def _decimal(digits: int, scale: int) -> Type:
    return Type(
        f"decimal({digits},{scale})",
        "decimal",
        lambda rng: f"{rng.randrange(-(10**5), 10**5)}.{rng.randrange(10**scale):0{scale}d}",
    )


def _moment(sql: str, first: int = 1900, last: int = 2100) -> Type:
    def literal(rng: Random) -> str:
        day = f"{rng.randrange(first, last)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
        return f"'{day} {rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}.{rng.randrange(10**6):06}'"

    return Type(sql, "moment", literal)


def _bytes(sql: str, most: int, family: str) -> Type:
    return Type(sql, family, lambda rng: f"X'{rng.randbytes(rng.choice([0, 1, most])).hex()}'")


def _bits(width: int) -> Type:
    return Type(f"bit({width})", "bit", lambda rng: f"b'{rng.getrandbits(min(width, 3)):b}'")


def _labels(*labels: str) -> Type:
    listed = ", ".join(f"'{one}'" for one in labels)
    return Type(f"enum({listed})", "enum", lambda rng: f"'{rng.choice(labels)}'")


INT: Final = _integer("int", -(1 << 31), (1 << 31) - 1)
BIGINT: Final = _integer("bigint", -(1 << 63), (1 << 63) - 1)
TEXT: Final = Type("text", "text", _word)
VARCHAR: Final = Type("varchar(30)", "varchar", _short)
MOOD: Final = _labels("sad", "ok", "happy")
DATETIME: Final = _moment("datetime(6)")
PLAIN: Final = (
    *(INT, BIGINT, TEXT, VARCHAR, MOOD, DATETIME),
    _integer("tinyint", -128, 127),
    _integer("smallint", -32768, 32767),
    _integer("int unsigned", 0, (1 << 32) - 1),
    _integer("bigint unsigned", 0, (1 << 64) - 1),
    _decimal(10, 4),
    _decimal(14, 2),
    Type("float", "float", lambda rng: rng.choice(["0", "1.5", "-2.25"])),
    Type("double", "float", lambda rng: rng.choice(["0", "0.1", "-1e300", "1e-9"])),
    Type("char(12)", "char", _short),
    Type("varchar(30) character set latin1", "latin", lambda rng: rng.choice(["'a'", "'zwölf'", "''"])),
    Type("date", "other", lambda rng: f"'{rng.randrange(1900, 2100)}-02-{rng.randrange(1, 29):02}'"),
    Type("time(3)", "other", lambda rng: f"'{rng.randrange(24):02}:00:01.5'"),
    Type("year", "other", lambda rng: str(rng.randrange(1901, 2155))),
    Type("json", "other", lambda rng: rng.choice(['\'{"b": 1, "a": [1, 2]}\'', "'null'", "'\"x\"'", "'[]'"])),
    Type("set('a','b','c')", "other", lambda rng: rng.choice(["''", "'a'", "'a,c'"])),
    _moment("datetime"),
    _moment("timestamp(3) NULL", 1975, 2030),
    _bytes("varbinary(8)", 8, "varbinary"),
    _bytes("blob", 40, "other"),
    Type("binary(8)", "binary", lambda rng: f"X'{rng.randbytes(8).hex()}'"),
    _bits(1),
    _bits(5),
)
WIDER: Final = {
    "tinyint": (INT, BIGINT),
    "smallint": (INT, BIGINT),
    "int": (BIGINT,),
    "varchar(30)": (replace(VARCHAR, sql="varchar(60)"), TEXT),
    "decimal(10,4)": (_decimal(14, 4),),
    "float": (Type("double", "float", lambda rng: rng.choice(["0", "0.1"])),),
    MOOD.sql: (_labels("sad", "ok", "happy", "glad"),),
}
DATA: Final = {"insert": 8, "update": 9, "delete": 3, "update_key": 2, "truncate": 1}
SCHEMA: Final = {
    "add_nullable": 3,
    "drop_column": 2,
    "rename_column": 3,
    "widen": 2,
    "drop_add_one": 1,
    "drop_add_two": 1,
    "swap_names": 1,
    "rename_chain": 1,
    "add_first": 1,
    "add_default": 1,
    "add_not_null": 1,
    "add_bit": 1,
    "add_binary": 1,
    "add_auto_increment": 1,
    "add_timestamp": 1,
    "add_expression": 1,
    "add_virtual": 1,
    "add_stored": 1,
    "set_default": 1,
    "modify_shorter": 1,
    "fewer_digits": 1,
    "enum_reorder": 1,
    "enum_lose": 1,
    "charset_lossy": 1,
    "set_not_null": 1,
    "varbinary_to_binary": 1,
    "bit_width": 1,
    "to_text": 1,
    "table_swap": 1,
    "drop_create": 1,
    "key_change": 1,
    "rename_key": 1,
    "rebuild": 1,
    "optimize": 1,
    "analyze": 1,
}


@dataclass
class MySqlBuilder(Builder):
    """A script for MariaDB or MySQL."""

    auto: bool = field(default=False)

    def __post_init__(self) -> None:
        self.data_weights, self.schema_weights = DATA, SCHEMA

    def start(self) -> None:
        types = self.rng.sample(PLAIN, self.rng.randint(2, 8))
        self.columns = [Column(self.new_name(), one, not_null=self._may_be_not_null(one)) for one in types]
        self.create.append(self._table())
        rows = ", ".join(self.row(self.new_key(), self.columns) for _ in range(FIRST_ROWS))
        self.create.append(f"INSERT INTO {{t}} VALUES {rows}")

    def _may_be_not_null(self, one: Type) -> bool:
        return "NULL" not in one.sql and self.rng.random() < 0.15

    def _table(self) -> str:
        shown = [f"{one.name} {one.type.sql}{' NOT NULL' if one.not_null else ''}" for one in self.columns]
        return f"CREATE TABLE {{t}} ({', '.join([f'{self.key} bigint PRIMARY KEY', *shown])}) CHARACTER SET utf8mb4"

    def _alter(self, name: str, what: str, *before: str) -> None:
        self.schema(name, *before, f"ALTER TABLE {{t}} {what}")

    def truncate(self) -> None:
        self.schema("truncate", "TRUNCATE TABLE {t}")

    def _add(self, name: str, type_: Type, more: str = "", *, not_null: bool = False, written: bool = True) -> Column:
        made = Column(self.new_name(), type_, not_null, written)
        self._alter(name, f"ADD COLUMN {made.name} {type_.sql}{more}")
        self.columns.append(made)
        return made

    def add_nullable(self) -> None:
        self._add("add_nullable", self.rng.choice(PLAIN), self.rng.choice(["", "", f" AFTER {self.key}"]))

    def add_first(self) -> None:
        self._add("add_first", self.rng.choice(PLAIN), " FIRST")

    def add_default(self) -> None:
        one = self.rng.choice([INT, BIGINT, VARCHAR, DATETIME, MOOD, _decimal(10, 4)])
        self._add("add_default", one, f" DEFAULT {one.literal(self.rng)}")

    def add_not_null(self) -> None:
        one = self.rng.choice([INT, VARCHAR, MOOD, _decimal(10, 4)])
        self._add("add_not_null", one, " NOT NULL", not_null=True)

    def add_bit(self) -> None:
        self._add("add_bit", _bits(5), " NOT NULL DEFAULT b'101'", not_null=True)

    def add_binary(self) -> None:
        self._add("add_binary", Type("binary(4)", "binary", lambda rng: "X'01020304'"), " DEFAULT 'ab'")

    def add_auto_increment(self) -> None:
        if not self.auto:
            self.auto = True
            self._add("add_auto_increment", INT, " NOT NULL AUTO_INCREMENT UNIQUE", not_null=True, written=False)

    def add_timestamp(self) -> None:
        made = Column(self.new_name(), _moment("timestamp(3) NULL", 1975, 2030))
        self.schema(
            "add_timestamp",
            "SET time_zone = '+05:00'",
            f"ALTER TABLE {{t}} ADD COLUMN {made.name} timestamp(3) NULL DEFAULT '2020-01-02 03:04:05'",
            "SET time_zone = '+00:00'",
        )
        self.columns.append(made)

    def add_expression(self) -> None:
        self._add("add_expression", VARCHAR, f" DEFAULT ({self.rng.choice(['LEFT(UUID(), 8)', '1 + 1', 'UPPER(1)'])})")

    def add_virtual(self) -> None:
        self._add("add_virtual", BIGINT, f" GENERATED ALWAYS AS ({self.key} + 1) VIRTUAL", written=False)

    def add_stored(self) -> None:
        self._add("add_stored", BIGINT, f" GENERATED ALWAYS AS ({self.key} * 2) STORED", written=False)

    def drop_column(self) -> None:
        if (one := self.some()) is not None and len(self.columns) > 1:
            self._alter("drop_column", f"DROP COLUMN {one.name}")
            self.changed(one, None)

    def rename_column(self) -> None:
        if (one := self.some()) is not None:
            new = replace(one, name=self.new_name())
            is_change = self.rng.random() < 0.4 and one.written
            text = f"CHANGE {one.name} {self._defined(new)}" if is_change else self._renamed(one.name, new.name)
            self._alter("rename_column", text)
            self.changed(one, new)

    def _renamed(self, old: str, new: str) -> str:
        return f"RENAME COLUMN {old} TO {new}"

    def _defined(self, one: Column) -> str:
        return f"{one.name} {one.type.sql}{' NOT NULL' if one.not_null else ''}"

    def _modify(self, name: str, one: Column | None, new: Type | None, not_null: bool | None = None) -> None:
        if one is None or new is None or not one.written:
            return
        changed = replace(one, type=new, not_null=one.not_null if not_null is None else not_null)
        self._alter(name, f"MODIFY {self._defined(changed)}")
        self.changed(one, changed)

    def widen(self) -> None:
        found = [one for one in self.columns if one.type.sql in WIDER]
        if found:
            one = self.rng.choice(found)
            self._modify("widen", one, self.rng.choice(WIDER[one.type.sql]))

    def drop_add_one(self) -> None:
        if (one := self.some()) is not None:
            new = Column(one.name, self.rng.choice(PLAIN))
            self._alter("drop_add_one", f"DROP COLUMN {one.name}, ADD COLUMN {self._defined(new)}")
            self.changed(one, new)

    def drop_add_two(self) -> None:
        if (one := self.some()) is not None:
            new = Column(one.name, self.rng.choice(PLAIN))
            texts = [f"ALTER TABLE {{t}} ADD COLUMN {self._defined(new)}"]
            self.schema("drop_add_two", f"ALTER TABLE {{t}} DROP COLUMN {one.name}", *texts)
            self.changed(one, new)

    def swap_names(self) -> None:
        if len(self.columns) > 1:
            one, other = self.rng.sample(self.columns, 2)
            texts = f"{self._renamed(one.name, other.name)}, {self._renamed(other.name, one.name)}"
            self._alter("swap_names", texts)
            first, second = replace(one, name=other.name), replace(other, name=one.name)
            self.columns = [first if each is one else second if each is other else each for each in self.columns]

    def rename_chain(self) -> None:
        if len(self.columns) > 1:
            one, other = self.rng.sample(self.columns, 2)
            away, moved = replace(one, name=self.new_name()), replace(other, name=one.name)
            texts = [f"ALTER TABLE {{t}} {self._renamed(other.name, one.name)}"]
            self.schema("rename_chain", f"ALTER TABLE {{t}} {self._renamed(one.name, away.name)}", *texts)
            self.columns = [away if each is one else moved if each is other else each for each in self.columns]

    def set_default(self) -> None:
        if one := self.some("integer", "decimal"):
            self._alter("set_default", f"ALTER COLUMN {one.name} SET DEFAULT 5")

    def modify_shorter(self) -> None:
        self._modify("modify_shorter", self.some("varchar"), replace(VARCHAR, sql="varchar(3)"))

    def fewer_digits(self) -> None:
        one = self.some("decimal", "moment")
        if one is not None:
            is_moment = one.type.family == "moment"
            short = "timestamp NULL" if "timestamp" in one.type.sql else "datetime"
            self._modify("fewer_digits", one, replace(one.type, sql=short) if is_moment else _decimal(10, 1))

    def enum_reorder(self) -> None:
        self._modify("enum_reorder", self.some("enum"), _labels("happy", "glad", "sad", "ok"))

    def enum_lose(self) -> None:
        self._modify("enum_lose", self.some("enum"), _labels("happy", "sad"))

    def charset_lossy(self) -> None:
        new = Type("varchar(30) character set latin1", "latin", lambda rng: "'a'")
        self._modify("charset_lossy", self.some("varchar", "char"), new)

    def set_not_null(self) -> None:
        if one := self.some("integer", "decimal", "varchar", "enum"):
            self._modify("set_not_null", one, one.type, not_null=True)

    def varbinary_to_binary(self) -> None:
        new = Type("binary(8)", "binary", lambda rng: f"X'{rng.randbytes(8).hex()}'")
        self._modify("varbinary_to_binary", self.some("varbinary"), new)

    def bit_width(self) -> None:
        self._modify("bit_width", self.some("bit"), _bits(self.rng.choice([1, 3, 9, 20])))

    def to_text(self) -> None:
        self._modify("to_text", self.some("integer", "decimal", "moment", "char"), replace(TEXT, sql="varchar(60)"))

    def table_swap(self) -> None:
        number = self.new_key()
        written = ", ".join([self.key, *(one.name for one in self.columns if one.written)])
        self.schema(
            "table_swap",
            f"CREATE TABLE {{t}}_new{number} LIKE {{t}}",
            f"INSERT INTO {{t}}_new{number} ({written}) SELECT {written} FROM {{t}} WHERE {self.key} % 2 = 0",
            f"RENAME TABLE {{t}} TO {{t}}_old{number}, {{t}}_new{number} TO {{t}}",
        )

    def drop_create(self) -> None:
        self.columns = [replace(one, written=True) for one in self.columns]
        self.auto = False
        rows = ", ".join(self.row(self.new_key(), self.columns) for _ in range(5))
        self.schema("drop_create", "DROP TABLE {t}", self._table(), f"INSERT INTO {{t}} VALUES {rows}")

    def key_change(self) -> None:
        one = Column(self.new_name(), INT, not_null=True)
        add = f"ADD COLUMN {one.name} int NOT NULL DEFAULT 0"
        self._alter("key_change", f"{add}, DROP PRIMARY KEY, ADD PRIMARY KEY ({self.key}, {one.name})")
        self.columns.append(one)

    def rename_key(self) -> None:
        new = self.new_name()
        self._alter("rename_key", self._renamed(self.key, new))
        self.key = new

    def rebuild(self) -> None:
        self._alter("rebuild", "ENGINE = InnoDB")

    def optimize(self) -> None:
        self.schema("optimize", "OPTIMIZE TABLE {t}")

    def analyze(self) -> None:
        self.schema("analyze", "ANALYZE TABLE {t}")
