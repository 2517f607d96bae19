"""What rows of several ages come to, piece by piece: the same whatever is merged first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.sources.unavailable import unavailable_names
from headwater.versioned.net_rows import GONE, PATCH, ROW, Piece, merge, net, piece_schema

SCHEMA = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.string())])


def piece(*rows: tuple[Any, ...]) -> Piece:
    """Rows ``(kind, id, a, b, names of unavailable columns)``, later ones newer."""
    columns: dict[str, Any] = {
        "id": [row[1] for row in rows],
        "a": [row[2] for row in rows],
        "b": [row[3] for row in rows],
        "_vnode": np.zeros(len(rows), np.uint16),
        "_kind": np.array([row[0] for row in rows], np.int8),
        "_unavailable": pa.array([row[4] if len(row) > 4 else None for row in rows], pa.string()),
    }
    return net([pa.RecordBatch.from_pydict(columns, schema=piece_schema(SCHEMA))], ["id"], SCHEMA)


def told(found: Piece) -> list[tuple[Any, ...]]:
    columns = ("_kind", "id", "a", "b", "_unavailable")
    return list(zip(*(found.rows.column(name).to_pylist() for name in columns), strict=True))


CASES: dict[str, tuple[list[Piece], list[tuple[Any, ...]]]] = {
    "the newest counts": ([piece((ROW, 1, "x", "y")), piece((ROW, 1, "z", None))], [(ROW, 1, "z", None, None)]),
    "a delete stays one": ([piece((ROW, 1, "x", "y")), piece((GONE, 1, None, None))], [(GONE, 1, None, None, None)]),
    "an untold value is that of before": (
        [piece((ROW, 1, "x", "y")), piece((ROW, 1, None, "w", "a"))],
        [(ROW, 1, "x", "w", None)],
    ),
    "over two that do not tell it": (
        [piece((ROW, 1, "x", "y")), piece((ROW, 1, None, "w", "a")), piece((ROW, 1, None, None, "a,b"))],
        [(ROW, 1, "x", "w", None)],
    ),
    "it stays untold where nobody tells it": ([piece((ROW, 1, None, "w", "a"))], [(ROW, 1, None, "w", "a")]),
    "after a delete there is nothing to keep": (
        [piece((ROW, 1, "x", "y")), piece((GONE, 1, None, None)), piece((ROW, 1, None, "w", "a"))],
        [(ROW, 1, None, "w", None)],
    ),
    "a patch of a row": ([piece((ROW, 1, "x", "y")), piece((PATCH, 1, None, "w", "a"))], [(ROW, 1, "x", "w", None)]),
    "a patch of nothing": (
        [piece((GONE, 1, None, None)), piece((PATCH, 1, None, "w", "a"))],
        [(GONE, 1, None, "w", None)],
    ),
    "a patch that waits for its row": ([piece((PATCH, 1, None, "w", "a"))], [(PATCH, 1, None, "w", "a")]),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_come_to_the_newest_of_their_key(name: str) -> None:
    pieces, expected = CASES[name]
    others = [piece((ROW, key, str(key), None)) for key in (0, 2)]
    found = told(merge([*others, *pieces]))
    assert [row for row in found if row[1] == 1] == expected
    if len(pieces) == 3:
        assert told(merge([merge(pieces[:2]), pieces[2]])) == told(merge([pieces[0], merge(pieces[1:])]))


def test_a_piece_has_one_row_for_each_key_in_order() -> None:
    found = piece(*((ROW, key, str(place), None) for place, key in enumerate([5, -1, 5, 3, -1])))
    assert [(row[1], row[2]) for row in told(found)] == [(-1, "4"), (3, "3"), (5, "2")]


def test_a_column_may_have_a_comma_in_its_name() -> None:
    told = pa.array(["a,b,c", None, "c"])
    assert unavailable_names(told, ["a,b", "c", "b,c,d"]) == ["a,b", "c"]
