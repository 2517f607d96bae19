"""Which Arrow type each Postgres type takes."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pytest

from headwater.sources.postgres.types import arrow_type, source_column
from headwater.sources.table import SpecialValues


@dataclass(frozen=True)
class Described:
    """A type as the catalog describes it."""

    oid: int
    delimiter: str = ","
    element: Described | None = None
    base: Described | None = None
    base_typmod: int = -1


def numeric(digits: int, scale: int) -> int:
    """The typmod of numeric(digits, scale)."""
    return (digits << 16 | scale & 0x7FF) + 4


NUMERIC = Described(1700)
TEXTS = {
    "money": 790,
    "interval": 1186,
    "timetz": 1266,
    "int4range": 3904,
    "int4multirange": 4451,
    "point": 600,
    "tsvector": 3614,
    "inet": 869,
    "cidr": 650,
    "macaddr": 829,
    "bit": 1560,
    "varbit": 1562,
    "xml": 142,
    "pg_lsn": 3220,
    "text": 25,
    "varchar": 1043,
    "char(n)": 1042,
    "name": 19,
    "uuid": 2950,
    "json": 114,
    "jsonb": 3802,
    "of an extension": 16500,
}


@pytest.mark.parametrize(
    ("oid", "kind"),
    [
        (16, pa.bool_()),
        (17, pa.binary()),
        (20, pa.int64()),
        (21, pa.int16()),
        (23, pa.int32()),
        (26, pa.int64()),
        (700, pa.float32()),
        (701, pa.float64()),
        (1082, pa.date32()),
        (1083, pa.time64("us")),
        (1114, pa.timestamp("us")),
        (1184, pa.timestamp("us", tz="UTC")),
        *((oid, pa.string()) for oid in TEXTS.values()),
    ],
)
def test_types_that_have_an_equal_take_it_and_all_others_are_text(oid: int, kind: pa.DataType) -> None:
    assert arrow_type(Described(oid), -1) == kind


@pytest.mark.parametrize(
    ("digits", "scale", "kind"),
    [
        (18, 4, pa.decimal128(18, 4)),
        (1, 0, pa.decimal128(1, 0)),
        (38, 38, pa.decimal128(38, 38)),
        (39, 0, pa.decimal256(39, 0)),
        (76, 10, pa.decimal256(76, 10)),
        (77, 0, pa.string()),
        (1000, 1000, pa.string()),
        (5, -2, pa.decimal128(7, 0)),
        (3, 5, pa.decimal128(5, 5)),
        (38, -1, pa.decimal256(39, 0)),
        (1000, -1000, pa.string()),
    ],
)
def test_numbers_with_a_precision_are_decimals_up_to_76_digits(digits: int, scale: int, kind: pa.DataType) -> None:
    assert arrow_type(NUMERIC, numeric(digits, scale)) == kind


def test_numbers_without_a_precision_are_text() -> None:
    assert arrow_type(NUMERIC, -1) == pa.string()


def test_a_domain_is_its_base() -> None:
    money = Described(20001, base=NUMERIC, base_typmod=numeric(10, 2))
    assert arrow_type(money, -1) == pa.decimal128(10, 2)
    assert arrow_type(Described(20002, base=money), -1) == pa.decimal128(10, 2)


def test_an_array_is_a_list_of_its_element() -> None:
    assert arrow_type(Described(1231, element=NUMERIC), numeric(10, 2)) == pa.list_(pa.decimal128(10, 2))
    assert arrow_type(Described(1009, element=Described(25)), -1) == pa.list_(pa.string())
    of_domain = Described(20003, element=Described(20002, base=Described(1082)))
    assert arrow_type(of_domain, -1) == pa.list_(pa.date32())
    of_arrays = Described(20004, element=Described(20005, base=Described(1007, element=Described(23))))
    assert arrow_type(of_arrays, -1) == pa.list_(pa.list_(pa.int32()))


def test_arrays_that_are_not_written_with_commas_are_text() -> None:
    assert arrow_type(Described(1020, element=Described(603, delimiter=";")), -1) == pa.string()
    assert arrow_type(Described(22, element=Described(21)), -1) == pa.string()
    assert arrow_type(Described(30, element=Described(26)), -1) == pa.string()


def test_the_policy_text_makes_the_column_text() -> None:
    text = source_column("d", Described(1082), -1, "date", 3, special_values=SpecialValues.TEXT)
    assert (text.type, text.source_type, text.field_id) == (pa.string(), "date", 3)
    null = source_column("d", Described(1082), -1, "date", 3, nullable=False, special_values=SpecialValues.NULL)
    assert (null.type, null.nullable) == (pa.date32(), False)
