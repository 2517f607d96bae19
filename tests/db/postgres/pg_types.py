"""Postgres's types for tests: how each is written, its edge values, random ones, and values that Arrow does not have.

All values are texts as the server reads them, not as it writes them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from psycopg.errors import FeatureNotSupported

from headwater.sources.postgres.connection import Connection

Texts = st.SearchStrategy[str]
TEXT = pa.string()

SETUP = (
    r"""CREATE TYPE mood AS ENUM ('sad', 'ok', 'very happy', 'it''s "quoted", \ here', 'größe', 'NULL', '{}')""",
    "CREATE TYPE pair AS (a int, b text, c numeric(6,2)[])",
    "CREATE TYPE nested AS (p pair, m mood, at timestamptz)",
    'CREATE TYPE textrange AS RANGE (subtype = text, collation = "C")',
    "CREATE SCHEMA other",
    "CREATE TABLE other.elsewhere (id int)",
)


@dataclass(frozen=True)
class Kind:
    """One type of a column.

    :ivar sql: how a table declares it.
    :ivar arrow: the Arrow type that it must take.
    :ivar random: values that the Arrow type has.
    :ivar edges: such values at the edges.
    :ivar special: values that the Arrow type does not have.
    :ivar plain: from SQL for a value to SQL for the value, or null where it is special.
    :ivar needs: an extension, or ``xml``.
    """

    sql: str
    arrow: pa.DataType
    random: Texts
    edges: tuple[str, ...]
    special: tuple[str, ...] = ()
    plain: Callable[[str], str] = lambda value: value
    delimiter: str = ","
    needs: str | None = None
    since: int = 0

    def values(self, *, special: bool) -> Texts:
        """Edges are as likely as all other values."""
        usual = st.one_of(st.sampled_from(self.edges), self.random)
        return st.one_of(usual, st.sampled_from(self.special)) if special and self.special else usual


# -- texts ----------------------------------------------------------------------------------------------------------

_NASTY = st.sampled_from(
    ["'", '"', "\\", ",", "{", "}", "(", ")", "[", "]", "\n", "\r", "\t", " ", "N", "\ufeff", "ü", "𝄞"]
)
_CHARACTERS = st.one_of(_NASTY, st.characters(exclude_characters="\0", codec="utf-8"))
_TEXT_EDGES = (
    "", " ", "NULL", "null", "\\N", "\\.", '"', '""', "'", "\\", "\\\\", ",", "{}", "{1,2}", "\n", "\r\n", "\t", " a ",
    "\ufeff", "\ufeffa", "größe", "𝄞", "a\u0301", "\x01\x7f", "x" * 300, "t", "NaN", "infinity", "\\x00",
)  # fmt: skip


def texts(most: int) -> Texts:
    return st.text(_CHARACTERS, max_size=most)


def _fits(most: int) -> tuple[str, ...]:
    return tuple(text for text in _TEXT_EDGES if len(text) <= most)


# -- numbers --------------------------------------------------------------------------------------------------------


def _written(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    return ("-" if number < 0 else "") + "Infinity" if math.isinf(number) else repr(number)


def _integer(sql: str, arrow: pa.DataType, least: int, most: int) -> Kind:
    return Kind(sql, arrow, st.integers(least, most).map(str), (str(least), str(most), "0", "-1" if least else "1"))


def numeric(digits: int, scale: int) -> Kind:
    """numeric(digits,scale), with every number of digits that fits."""
    arrow_scale = max(scale, 0)
    arrow_digits = max(digits - min(scale, 0), arrow_scale)
    if arrow_digits <= 38:
        arrow = pa.decimal128(arrow_digits, arrow_scale)
    else:
        arrow = pa.decimal256(arrow_digits, arrow_scale) if arrow_digits <= 76 else TEXT
    most = 10**digits - 1

    def text(number: int) -> str:
        sign, magnitude = ("-" if number < 0 else ""), str(abs(number))
        if scale <= 0:
            return sign + magnitude + "0" * -scale
        magnitude = magnitude.rjust(scale + 1, "0")
        return f"{sign}{magnitude[:-scale]}.{magnitude[-scale:]}"

    edges = (text(most), text(-most), text(0), text(1), text(-1), "-0", "1e-3000")
    values = st.one_of(st.integers(-most, most), st.integers(-min(most, 999), min(most, 999))).map(text)
    if arrow == TEXT:
        return Kind(f"numeric({digits},{scale})", arrow, values, (*edges, "NaN"))
    plain = "CASE WHEN {0} <> 'NaN' THEN {0} END".format
    return Kind(f"numeric({digits},{scale})", arrow, values, edges, ("NaN",), plain)


_HUGE = (
    "0", "-0", "0.00", "1.10", "-1.1000", "1e100", "1e-100", "123456789" * 12 + "." + "987654321" * 12, "9" * 131072,
    "0." + "0" * 16382 + "1", "NaN", "Infinity", "-Infinity",
)  # fmt: skip
_DECIMALS = st.builds(
    lambda number, scale: format(Decimal(number).scaleb(-scale), "f"),
    st.integers(-(10**60), 10**60),
    st.integers(0, 30),
)

# -- times ----------------------------------------------------------------------------------------------------------

_FAR = ("infinity", "-infinity")
_DATES = st.dates().map(dt.date.isoformat)
_TIMES = st.times().map(dt.time.isoformat)
_OFFSETS = st.sampled_from(["+00", "-08", "+05:30", "+14", "-15:59", "+00:00:01"])
_INNER = st.datetimes().filter(lambda moment: 1 < moment.year < 9999)  # in the years 1 to 9999 in every time zone
_MOMENTS = st.datetimes().map(lambda moment: moment.isoformat(" "))
_ZONED = st.builds(lambda moment, zone: moment.isoformat(" ") + zone, _INNER, _OFFSETS)
_IN_YEARS = "CASE WHEN isfinite({0}) AND {0} >= '0001-01-01' AND {0} < '10000-01-01' THEN {0} END".format
_MOMENT_EDGES = (
    "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999", "1970-01-01 00:00:00", "1969-12-31 23:59:59.999999",
    "2000-01-01 00:00:00.1", "2000-02-29 12:00:00.000001", "1582-10-10 00:00:00", "2024-12-31 23:59:60",
    "1677-09-21 00:12:43.145223", "2262-04-11 23:47:16.854776", "2024-01-01 00:00:00.123450",
)  # fmt: skip
_MOMENT_SPECIAL = (
    *_FAR, "4714-11-24 00:00:00 BC", "0001-12-31 23:59:59.999999 BC", "10000-01-01 00:00:00",
    "294276-12-31 23:59:59.999999",
)  # fmt: skip


def _zoned(text: str) -> str:
    moment, _, era = text.partition(" BC")
    return text if text in _FAR else f"{moment}+00{' BC' if era or text.endswith('BC') else ''}"


def _moments(precision: str, edges: tuple[str, ...], special: tuple[str, ...]) -> Iterator[Kind]:
    yield Kind(f"timestamp{precision}", pa.timestamp("us"), _MOMENTS, edges, special, _IN_YEARS)
    yield Kind(
        f"timestamp{precision} with time zone",
        pa.timestamp("us", tz="UTC"),
        _ZONED,
        tuple(map(_zoned, edges)),
        tuple(map(_zoned, special)),
        _IN_YEARS,
    )


_INTERVALS = st.builds(
    lambda months, days, micros: f"{months} mons {days} days {micros / 1e6:.6f} seconds",
    *(st.integers(-100_000, 100_000) for _ in range(3)),
)

# -- what is made of others -----------------------------------------------------------------------------------------

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(_CHARACTERS, max_size=6),
)
_JSON = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(_CHARACTERS, max_size=3), inner, max_size=3),
    max_leaves=6,
).map(lambda value: json.dumps(value, ensure_ascii=False, indent=1))
_JSON_EDGES = (
    "null", "{}", "[]", '""', "1.10", "-0", "0e5", "1E400", '{"a": 1.0, "a": 1.00}',
    '  [1 ,\n2 ] ', '"\\u00e9\\n"', "123456789012345678901234567890",
)  # fmt: skip
_NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr)
_POINTS = st.builds("({},{})".format, _NUMBERS, _NUMBERS)
_BITS = st.text("01", max_size=40)
_HEX = st.binary(max_size=20).map(lambda data: "\\x" + data.hex())


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def array_text(elements: list[str | None], delimiter: str = ",") -> str:
    """An array as the server reads it, every element in quotes."""
    return "{" + delimiter.join("NULL" if element is None else quoted(element) for element in elements) + "}"


def row_text(fields: list[str | None]) -> str:
    """A composite value as the server reads it."""
    return "(" + ",".join("" if field is None else quoted(field) for field in fields) + ")"


def _range(low: str | None, high: str | None, ends: str) -> str:
    return ends[0] + ",".join("" if bound is None else quoted(bound) for bound in (low, high)) + ends[1]


def _ranges(values: st.SearchStrategy[Any], write: Callable[[Any], str] = str) -> Texts:
    def made(low: Any, high: Any, ends: str, infinite: int) -> str:
        low, high = sorted((low, high))
        return _range(None if infinite & 1 else write(low), None if infinite & 2 else write(high), ends)

    ends = st.sampled_from(["[)", "()", "[]", "(]"])
    return st.one_of(st.just("empty"), st.builds(made, values, values, ends, st.sampled_from([0, 0, 0, 1, 2, 3])))


def _range_kinds() -> Iterator[Kind]:
    of: dict[str, tuple[Texts, tuple[str, ...]]] = {
        "int4": (_ranges(st.integers(-1000, 1000)), ("empty", "(,)", "[1,1]", "[-2147483648,2147483647)")),
        "int8": (_ranges(st.integers(-(10**12), 10**12)), ("empty", "[5,)", "(,5]")),
        "num": (_ranges(st.decimals(-100, 100, places=3)), ("empty", "[1.10,2.00]", "[-Infinity,NaN]")),
        "date": (_ranges(st.dates(), dt.date.isoformat), ("empty", "[2024-01-01,infinity]", '["0044-03-15 BC",)')),
        "ts": (_ranges(st.datetimes(), lambda at: at.isoformat(" ")), ("empty", '["2024-01-01 00:00:00.5",infinity)')),
        "tstz": (_ranges(_INNER, lambda at: at.isoformat(" ") + "+05:30"), ("empty", "(,)")),
    }
    for name, (values, edges) in of.items():
        yield Kind(f"{name}range", TEXT, values, edges)
        many = st.lists(values, max_size=3).map(lambda ranges: "{" + ",".join(ranges) + "}")
        yield Kind(f"{name}multirange", TEXT, many, ("{}", *(f"{{{edge}}}" for edge in edges)))
    bound = texts(5).filter(lambda text: text != "")
    text_ranges = _ranges(bound)
    yield Kind("public.textrange", TEXT, text_ranges, ("empty", "(,)", '["a,b","c\\"]")', '["",a]'))


def _base_kinds() -> Iterator[Kind]:
    yield Kind("boolean", pa.bool_(), st.sampled_from(["t", "f"]), ("true", "no"))
    yield _integer("smallint", pa.int16(), -(2**15), 2**15 - 1)
    yield _integer("integer", pa.int32(), -(2**31), 2**31 - 1)
    yield _integer("bigint", pa.int64(), -(2**63), 2**63 - 1)
    yield _integer("oid", pa.int64(), 0, 2**32 - 1)
    yield Kind(
        "real",
        pa.float32(),
        st.floats(width=32).map(_written),
        ("-0", "0", "NaN", "Infinity", "-Infinity", "1e-45", "3.4028235e38", "0.1", "16777217", "1.17549435e-38"),
    )
    yield Kind(
        "double precision",
        pa.float64(),
        st.floats().map(_written),
        (
            "-0",
            "0",
            "NaN",
            "Infinity",
            "-Infinity",
            "5e-324",
            "1.7976931348623157e308",
            "0.1",
            "1e23",
            "9007199254740993",
        ),
    )
    for digits, scale in (
        (1, 0), (4, 2), (9, 9), (18, 4), (19, 0), (38, 0), (38, 10), (38, 38), (39, 0), (50, 25), (76, 0),
        (76, 76), (77, 1), (1000, 500), (3, 5), (2, 70), (2, 90), (5, -2), (30, -8), (30, -9), (10, -66), (10, -67),
        (3, 1000), (3, -1000),
    ):  # fmt: skip
        yield numeric(digits, scale)
    yield Kind("numeric", TEXT, _DECIMALS, _HUGE)
    cents = st.integers(-(2**63), 2**63 - 1).map(lambda value: format(Decimal(value).scaleb(-2), "f"))
    yield Kind("money", TEXT, cents, ("-92233720368547758.08", "92233720368547758.07", "0", "-0.01", "$1,234.50"))
    for name in ("text", "varchar"):
        yield Kind(name, TEXT, texts(12), _TEXT_EDGES)
    yield Kind("varchar(7)", TEXT, texts(7), _fits(7))
    yield Kind("char(5)", TEXT, texts(5), _fits(5))
    yield Kind("char(1)", TEXT, texts(1), _fits(1))
    yield Kind("bpchar", TEXT, texts(5), _fits(5))
    yield Kind('"char"', TEXT, st.sampled_from("aZ0 ,\"'\\{"), ("", "\\377", "\\001", "a", "é", "\n"))
    yield Kind("name", TEXT, texts(8), _fits(60))
    yield Kind("public.citext", TEXT, texts(8), _TEXT_EDGES, needs="citext")
    yield Kind("bytea", pa.binary(), _HEX, ("\\x", "\\x00", "\\xff0a22", "\\x" + "ab" * 3000, "plain \\000 escape"))
    yield Kind(
        "date",
        pa.date32(),
        _DATES,
        ("0001-01-01", "9999-12-31", "1970-01-01", "2000-02-29", "1582-10-10"),
        (*_FAR, "0001-12-31 BC", "4714-11-24 BC", "10000-01-01", "5874897-12-31"),
        _IN_YEARS,
    )
    yield from _moments("", _MOMENT_EDGES, _MOMENT_SPECIAL)
    yield from _moments("(0)", _MOMENT_EDGES[:1] + _MOMENT_EDGES[2:], (*_FAR, _MOMENT_EDGES[1]))
    yield from _moments("(3)", ("2024-01-01 00:00:00.0005", "2024-01-01 00:00:00.100"), _FAR)
    times = ("00:00", "23:59:59.999999", "12:34:56.1", "00:00:00.000001", "04:05 PM")
    yield Kind("time", pa.time64("us"), _TIMES, times, ("24:00:00",), "nullif({}, '24:00')".format)
    yield Kind("time(2)", pa.time64("us"), st.sampled_from(["01:02:03.45", "01:02:03"]), times[2:],
               ("24:00:00", "23:59:59.999"), "nullif({}, '24:00')".format)  # fmt: skip
    zoned = st.builds(lambda time, zone: time.isoformat() + zone, st.times(), _OFFSETS)
    yield Kind("time with time zone", TEXT, zoned, ("24:00:00+00", "00:00:00+15:59", "23:59:59.999999-15:59:59"))
    yield Kind(
        "interval",
        TEXT,
        _INTERVALS,
        (
            "0",
            "1 mon -1 day +00:00:00.000001",
            "-178000000 years",
            "178000000 years",
            "1 year 2 mons -3 days",
            "-00:00:01",
        ),
    )
    yield Kind("interval", TEXT, _INTERVALS, (*_FAR, "1 day"), since=17)
    yield Kind(
        "interval year to month", TEXT, st.integers(-99, 99).map(lambda months: f"{months} mons"), ("1-2", "-0-1")
    )
    yield Kind("json", TEXT, _JSON, (*_JSON_EDGES, '"\\u0000"'))
    yield Kind("jsonb", TEXT, _JSON, _JSON_EDGES)
    yield Kind("jsonpath", TEXT, st.sampled_from(["$.a[*]", "$"]), ('$."a\\"b" ? (@ > 1.10)', "strict $.x"))
    yield Kind("uuid", TEXT, st.uuids().map(str), (str(uuid.UUID(int=0)), "{A0EEBC99-9C0B4EF8-BB6D6BB9-BD380A11}"))
    yield Kind(
        "xml",
        TEXT,
        st.just("<a>1</a>"),
        ('<a b="\'">&lt;\n</a>', "text alone", "", '<?xml version="1.0"?><a/>'),
        needs="xml",
    )
    yield Kind("inet", TEXT, st.ip_addresses().map(str), ("10.0.0.1/8", "::ffff:1.2.3.4/128", "0.0.0.0/0", "fe80::1"))
    yield Kind("cidr", TEXT, st.ip_addresses().map(str), ("10.0.0.0/8", "::/0", "1.2.3.4/32"))
    macs = st.binary(min_size=6, max_size=6).map(lambda data: data.hex(":"))
    yield Kind("macaddr", TEXT, macs, ("ff:ff:ff:ff:ff:ff", "0800.2b01.0203"))
    yield Kind(
        "macaddr8", TEXT, st.binary(min_size=8, max_size=8).map(lambda data: data.hex(":")), ("08-00-2b-01-02-03",)
    )
    yield Kind("bit(3)", TEXT, st.sampled_from(["000", "101"]), ("111", "010"))
    yield Kind("bit varying", TEXT, _BITS, ("", "1", "0" * 70))
    yield Kind("bit varying(5)", TEXT, st.text("01", max_size=5), ("", "10101"))
    yield Kind("point", TEXT, _POINTS, ("(0,-0)", "(NaN,Infinity)", "(1e-300,0.1)", "1,2"))
    yield Kind("line", TEXT, st.sampled_from(["{1,2,3}", "{0,-1,0.1}"]), ("{1,-0,0}", "[(0,0),(1,1)]"))
    yield Kind("lseg", TEXT, st.builds("[{},{}]".format, _POINTS, _POINTS), ("[(0,0),(1,1)]",))
    yield Kind(
        "box", TEXT, st.builds("({},{})".format, _POINTS, _POINTS), ("((1,2),(0,0))", "((NaN,0),(0,1))"), delimiter=";"
    )
    paths = st.lists(_POINTS, min_size=1, max_size=4).map(",".join)
    yield Kind("path", TEXT, paths.map("[{}]".format), ("[(0,0),(1,1)]", "((0,0),(1,1))"))
    yield Kind("polygon", TEXT, paths.map("({})".format), ("((0,0),(1,1),(1,0))",))
    radius = st.floats(0, 1e6).map(repr)
    yield Kind("circle", TEXT, st.builds("<{},{}>".format, _POINTS, radius), ("<(0,0),0>", "<(1,2),Infinity>"))
    words = st.lists(st.text("ab'\\ ,ü", min_size=1, max_size=4), max_size=4)
    quoted_words = words.map(
        lambda found: " ".join("'" + w.replace("\\", "\\\\").replace("'", "''") + "'" for w in found)
    )
    yield Kind("tsvector", TEXT, quoted_words, ("", "a:1A,2 b:3", "'it''s' '\\\\'"))
    yield Kind("tsquery", TEXT, st.sampled_from(["a & b", "!a"]), ("", "'it''s' <-> b:*A", "(a | b) & !c"))
    yield from _range_kinds()
    yield Kind(
        "public.mood", TEXT, st.sampled_from(["sad", "very happy"]), ('it\'s "quoted", \\ here', "größe", "NULL", "{}")
    )
    fields = st.builds(
        lambda a, b, c: row_text([a, b, c]),
        st.none() | st.integers(-9, 9).map(str),
        st.none() | texts(6),
        st.none() | st.just("{1.50,NULL}"),
    )
    yield Kind("public.pair", TEXT, fields, ("(,,)", '(1,"",{})', '(,"a""b\\\\",)', "(-1,NULL,)"))
    yield Kind(
        "public.nested",
        TEXT,
        st.builds(lambda pair, at: row_text([pair, "sad", at]), fields, _ZONED),
        ("(,,)", '("(,,)",,infinity)', '("(1,""a,b"",{1.00})","very happy","2024-01-01 00:00:00+00")'),
    )
    yield Kind(
        "pg_lsn",
        TEXT,
        st.integers(0, 2**64 - 1).map(lambda lsn: f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"),
        ("0/0", "FFFFFFFF/FFFFFFFF"),
    )
    yield Kind("pg_snapshot", TEXT, st.just("10:20:10,14"), ("1:1:",))
    yield Kind("xid", TEXT, st.integers(0, 2**32 - 1).map(str), ("0", "4294967295"))
    yield Kind("xid8", TEXT, st.integers(0, 2**63).map(str), ("0", "18446744073709551615"))
    yield Kind("tid", TEXT, st.just("(1,2)"), ("(0,0)", "(4294967295,65535)"))
    yield Kind("regclass", TEXT, st.just("pg_catalog.pg_class"), ("other.elsewhere", "-"))
    yield Kind("regtype", TEXT, st.just("integer"), ("public.mood", "numeric"))
    yield Kind("regproc", TEXT, st.just("pg_catalog.now"), ("-", "pg_catalog.now"))
    yield Kind("int2vector", TEXT, st.just("1 2 3"), ("", "-1"))
    yield Kind("oidvector", TEXT, st.just("1 4294967295"), ("",))
    yield Kind(
        "hstore", TEXT, st.just('"a"=>"1", "b"=>NULL'), ("", '"q\\"\\\\ ,"=>"=>"', "a=>NULL, NULL=>b"), needs="hstore"
    )
    yield Kind("public.ltree", TEXT, st.just("a.b.c"), ("", "Top"), needs="ltree")
    yield Kind(
        "vector",
        TEXT,
        st.lists(_NUMBERS, min_size=1, max_size=4).map(lambda n: f"[{','.join(n)}]"),
        ("[1]", "[-0,1e-38]"),
        needs="vector",
    )
    yield Kind(
        "vector(3)",
        TEXT,
        st.lists(_NUMBERS, min_size=3, max_size=3).map(lambda n: f"[{','.join(n)}]"),
        ("[1,2.5,-3e-5]",),
        needs="vector",
    )


def array_of(kind: Kind) -> Kind:
    """An array of *kind*; what is special in it is a special element, more dimensions, or other bounds."""

    def written(elements: list[str | None]) -> str:
        return array_text(elements, kind.delimiter)

    first, last = kind.edges[0], kind.edges[-1]
    edges = (
        "{}",
        written([None]),
        written([None, first, None]),
        written(list(kind.edges)),
        written([first] * 20),
    )
    inner = written([first, last])
    special = (
        "{" + kind.delimiter.join((inner, inner)) + "}",
        f"[2:3]={inner}",
        f"[-1:0][5:5]={{{written([first])}{kind.delimiter}{written([None])}}}",
        *(written([first, value, None]) for value in kind.special),
    )

    def plain(value: str) -> str:
        usual = f"array_ndims({value}) IS NULL OR (array_ndims({value}) = 1 AND array_lower({value}, 1) = 1)"
        if not kind.special:
            return f"CASE WHEN {usual} THEN {value} END"
        elements = f"SELECT array_agg({kind.plain('e')} ORDER BY n) FROM unnest({value}) WITH ORDINALITY u(e, n)"
        return f"(CASE WHEN cardinality({value}) = 0 THEN {value} WHEN {usual} THEN ({elements}) END)::{kind.sql}[]"

    is_list = kind.delimiter == ","
    return replace(
        kind,
        sql=f"{kind.sql}[]",
        arrow=pa.list_(kind.arrow) if is_list else TEXT,
        random=st.lists(st.none() | kind.values(special=False), max_size=4).map(written),
        edges=edges if is_list else (*edges, *special),
        special=special if is_list else (),
        plain=plain,
    )


def domain_of(kind: Kind, name: str) -> Kind:
    """A domain over *kind*; :func:`kinds_of` makes it."""
    return replace(kind, sql=name)


def composite_of(kinds: Sequence[Kind], name: str) -> Kind:
    """A composite type of *kinds*, whatever is special in them: it is text."""
    fields = st.tuples(*(st.none() | kind.values(special=True) for kind in kinds))
    edges = tuple(row_text([kind.edges[place % len(kind.edges)] for kind in kinds]) for place in range(3))
    return Kind(name, TEXT, fields.map(lambda values: row_text(list(values))), (*edges, row_text([None] * len(kinds))))


BASE: tuple[Kind, ...] = tuple(_base_kinds())


FORMS = 6
"""How many kinds :func:`kinds_of` makes of each type; the type itself is the first."""


def kinds_of(session: Connection) -> list[Kind]:
    """All that a fresh database can have, made in it: each type, domains over it, and arrays of both."""
    available = {row[0] for row in session.execute("SELECT name FROM pg_available_extensions")}
    with contextlib.suppress(FeatureNotSupported):
        session.execute("SELECT '<a/>'::xml")
        available.add("xml")
    version = session.info.server_version // 10_000
    base = [kind for kind in BASE if version >= kind.since and (kind.needs is None or kind.needs in available)]
    for extension in sorted({kind.needs for kind in base if kind.needs} - {"xml"}):
        session.execute(f"CREATE EXTENSION {extension}".encode())
    for statement in SETUP:
        session.execute(statement.encode())
    made = []
    for place, kind in enumerate(base):
        session.execute(f"CREATE DOMAIN public.d{place} AS {kind.sql}".encode())
        session.execute(f"CREATE DOMAIN public.a{place} AS {kind.sql}[]".encode())
        domain, array = domain_of(kind, f"public.d{place}"), array_of(kind)
        arrays = array_of(replace(domain_of(array, f"public.a{place}"), special=()))
        made += [
            kind,
            array,
            domain,
            array_of(domain),
            domain_of(array, f"public.a{place}"),
            replace(arrays, special=()),
        ]
    return made
