"""Fitting: rows that were written with the columns of then, with the columns of now. Pure.

A column is known by its field id, also when its name has changed. One that the rows do not have is null. The names in
``_unavailable`` are those of then, too.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from headwater.sources.table import FIELD_ID
from headwater.sources.unavailable import names_column, unavailable_names, unavailable_texts


def places(has: pa.Schema, wanted: pa.Schema) -> list[int | None]:
    """For each field of *wanted* its place in *has*."""
    by_id = {field.metadata[FIELD_ID]: place for place, field in enumerate(has) if _has_id(field)}
    by_name = {field.name: place for place, field in enumerate(has) if not _has_id(field)}
    return [
        by_id.get(field.metadata[FIELD_ID]) if _has_id(field) and by_id else by_name.get(field.name) for field in wanted
    ]


def fitted(rows: pa.RecordBatch, wanted: pa.Schema) -> list[pa.Array]:
    """The columns of *wanted*, from *rows*."""
    return [
        pa.nulls(rows.num_rows, field.type) if place is None else cast(rows.column(place), field.type)
        for place, field in zip(places(rows.schema, wanted), wanted, strict=True)
    ]


def fitted_names(told: Any, has: pa.Schema, wanted: pa.Schema) -> Any:
    """*told*, an ``_unavailable`` column of rows with the columns *has*, with the names that *wanted* has for them."""
    if told.null_count == len(told):
        return told
    now = {place: field.name for place, field in zip(places(has, wanted), wanted, strict=True) if place is not None}
    before = {place: has.field(place).name for place in now}
    if now == before and not unavailable_names(told, [name for name in wanted.names if name not in before.values()]):
        return told
    known = unavailable_names(told, list(before.values()))
    masks = {now[place]: names_column(told, name) for place, name in before.items() if name in known}
    return unavailable_texts(masks, len(told))


def cast(values: Any, kind: pa.DataType) -> Any:
    """*values* as *kind*, without loss; both a source's type to a sink's and back."""
    if values.type == kind:
        return values
    if getattr(values.type, "extension_name", None) == "arrow.uuid":
        values = values.cast(values.type.storage_type)
    if getattr(kind, "extension_name", None) == "arrow.uuid":
        return values.cast(kind.storage_type).cast(kind)
    return values.cast(kind)


def _has_id(field: pa.Field) -> bool:
    return bool(field.metadata) and FIELD_ID in field.metadata
