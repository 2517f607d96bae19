"""The golden vectors of docs/formats/vnode.md: tests/fixtures/stream/vnode_v1.json.

Each vector is ``{"key": [[type, value], …], "hash": hex, "vnodes": {count: vnode}}``. A value is null, a number, a
text, or ``{"hex": …}`` for bytes, ``{"unscaled": …}`` for decimals, ``{"repeat": [text, times]}`` for long texts and
``{"float": …}`` for what JSON cannot say; dates and times are their ticks.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

FILE = Path(__file__).parents[2] / "fixtures" / "stream" / "vnode_v1.json"

TYPES: dict[str, Any] = {
    **{f"int{bits}": pa.type_for_alias(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": pa.type_for_alias(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "bool": pa.bool_(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "binary_view": pa.binary_view(),
    "binary[4]": pa.binary(4),
    "uuid": pa.uuid(),
    "date32": pa.date32(),
    "date64": pa.date64(),
    "time32[s]": pa.time32("s"),
    "time64[ns]": pa.time64("ns"),
    **{f"timestamp[{unit}]": pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")},
    "timestamp[ms, UTC]": pa.timestamp("ms", "UTC"),
    "duration[us]": pa.duration("us"),
    "decimal128(38, 2)": pa.decimal128(38, 2),
    "decimal256(76, 0)": pa.decimal256(76, 0),
    "null": pa.null(),
}


def load() -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads(FILE.read_text("utf-8"))["vectors"]
    return vectors


def value_of(kind: Any, value: Any) -> Any:
    match value:
        case {"hex": text}:
            return bytes.fromhex(text)
        case {"unscaled": number}:
            return Decimal((number < 0, tuple(map(int, str(abs(number)))), -kind.scale))
        case {"repeat": [text, times]}:
            return text * times
        case {"float": text}:
            value = float(text)
    if value is not None and pa.types.is_float16(kind):
        return np.float16(value)
    return value


def rows_of(key: list[list[Any]]) -> Any:
    """One row with the columns ``"0"``, ``"1"``, …"""
    arrays = {}
    for place, (name, value) in enumerate(key):
        kind = TYPES[name]
        arrays[str(place)] = pa.array([value_of(kind, value)], kind)
    return pa.record_batch(arrays)
