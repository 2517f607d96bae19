"""The proof of the demo: the tables that the logs tell of, against the tables themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from headwater.capture.replay import replay
from headwater.log_store import LogView
from headwater.sources.open import open_source
from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.snapshot import read_table
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, SourceTable
from headwater.state import Snapshot, open_reader


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found; all that must be zero is zero when nothing went wrong.

    :ivar lost: rows of the source that the log does not have.
    :ivar extra: rows of the log that the source does not have.
    :ivar doubled: changes that the log tells twice.
    """

    source_rows: int
    replayed_rows: int
    changes: int
    mismatches: int
    lost: int
    extra: int
    doubled: int
    latency_p50_ms: float
    latency_p99_ms: float

    @property
    def is_right(self) -> bool:
        return self.changes > 0 and not (self.mismatches or self.lost or self.extra or self.doubled)


def check(dsn: str, store: Path, tables: tuple[str, ...]) -> Checked:
    """Compare all *tables*; nothing may be written to them meanwhile."""
    source = open_source(dsn, spill=store / "unused")
    described = source.tables(tables)
    source.close()
    totals = np.zeros(7, np.int64)
    delays: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    with open_reader(store) as reader, reader.snapshot() as view:
        for table in described:
            totals += _compared(dsn, view, table)
            totals += [0, 0, *_changes(view, table.full_name, delays), 0, 0, 0]
    source_rows, replayed, changes, doubled, mismatches, lost, extra = (int(total) for total in totals)
    all_delays = np.concatenate(delays) if delays else np.zeros(1)
    return Checked(
        source_rows,
        replayed,
        changes,
        mismatches,
        lost,
        extra,
        doubled,
        float(np.percentile(all_delays, 50)),
        float(np.percentile(all_delays, 99)),
    )


def _compared(dsn: str, view: Snapshot, table: SourceTable) -> list[int]:
    source = pa.Table.from_batches(read_table(Dsn(dsn), table), table.schema)
    told = replay(view, table.full_name).select(table.schema.names).cast(table.schema)
    keys = list(table.key_columns)
    values = [name for name in table.schema.names if name not in keys]
    names = [f"{name}_told" for name in values]
    joined = source.append_column("_here", pa.array(np.ones(source.num_rows, np.bool_))).join(
        told.rename_columns([*[name if name in keys else f"{name}_told" for name in table.schema.names]]).append_column(
            "_there", pa.array(np.ones(told.num_rows, np.bool_))
        ),
        keys,
        join_type="full outer",
    )
    here = joined.column("_here").fill_null(False).to_numpy()
    there = joined.column("_there").fill_null(False).to_numpy()
    same = np.ones(joined.num_rows, np.bool_)
    for name, other in zip(values, names, strict=True):
        left, right = joined.column(name), joined.column(other)
        equal = pa.compute.equal(left, right).fill_null(False).to_numpy()
        both_null = left.is_null().to_numpy() & right.is_null().to_numpy()
        same &= equal | both_null
    mismatches = int((here & there & ~same).sum())
    return [source.num_rows, told.num_rows, 0, 0, mismatches, int((here & ~there).sum()), int((there & ~here).sum())]


def _changes(view: Snapshot, log: str, delays: list[np.ndarray[tuple[int], np.dtype[np.float64]]]) -> list[int]:
    """How many changes, how many of them twice; and how long each took from commit to durable."""
    shown = LogView.open(view, log)
    sealed = {int(end.epoch): end.sealed_ms for end in shown.epochs()}
    positions, count = [], 0
    for batch in shown.read_range(0, shown.sealed):
        positions.append(batch.column(POSITION_COLUMN))
        count += batch.num_rows
        committed = batch.column(COMMIT_TIMESTAMP_COLUMN).cast(pa.int64()).to_numpy() / 1000
        durable = np.array([sealed[int(epoch)] for epoch in batch.column("_epoch").unique().to_pylist()])
        delays.append(durable.max() - committed)
    distinct = len(pa.chunked_array(positions, pa.binary(16)).unique()) if positions else 0
    return [count, count - distinct]
