"""JSON lines: what a batch writes as lines of JSON, in the order of its steps. Pure.

Each line is an object: ``_table``, in a mirror ``_step`` (``clear``, ``delete``, ``upsert`` or ``update``), then the
columns of the row, as :mod:`headwater.sinks.json_rows` has them. Lines of changes are change rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from headwater.sinks.json_rows import json_texts, objects_of, slices
from headwater.sinks.row_batch import Append, Clear, Delete, RowBatch, Step
from headwater.sources.table import SourceTable


def json_lines(table: SourceTable, batch: RowBatch, rows: int) -> Iterator[list[str]]:
    """The lines in groups of *rows*, the last one may be smaller: the same batch is always cut in the same way."""
    held: list[str] = []
    for step in batch.steps():
        for some in step_lines(table, step):
            held += some
            whole = len(held) - len(held) % rows
            yield from (held[start : start + rows] for start in range(0, whole, rows))
            held = held[whole:]
    if held:
        yield held


def step_lines(table: SourceTable, step: Step) -> Iterator[list[str]]:
    """The lines of one step."""
    fixed: dict[str, Any] = {"_table": json.dumps(table.full_name, ensure_ascii=False)}
    if not isinstance(step, Append):
        fixed["_step"] = json.dumps(type(step).__name__.lower())
    if isinstance(step, Clear):
        yield objects_of(fixed, 1).to_pylist()
    for rows in slices(rows_of(step)):
        texts = {name: json_texts(rows.column(name)) for name in rows.schema.names}
        yield objects_of({**fixed, **texts}, rows.num_rows).to_pylist()


def rows_of(step: Step) -> pa.Table:
    """The rows of *step*; none of one that clears."""
    match step:
        case Clear():
            return pa.table({})
        case Delete(keys):
            return keys
        case _:
            return step.rows
