"""Opens the backfill of a table as its state has it, or begins one."""

from __future__ import annotations

from typing import Any

from headwater.backfill.cdc.executor import BackfillExecutor, BackfillOptions
from headwater.backfill.cdc.parallel import ParallelizedCdcBackfillExecutor
from headwater.backfill.cdc.single import CdcBackfillExecutor
from headwater.backfill.cdc.state import BackfillRecord, BackfillTables, CdcBackfillState
from headwater.sources.table import SourceTable
from headwater.state import Snapshot


def open_backfill(
    table: SourceTable, tables: BackfillTables, view: Snapshot, options: BackfillOptions
) -> BackfillExecutor:
    """The backfill of *table*.

    =============================================  ==============================================
    stored                                         opened
    =============================================  ==============================================
    nothing                                        a new one
    of a table of that name that is gone           a new one; pause and throttle stay
    unfinished, of version 1, and 2 is wanted      goes on as version 2
    anything else                                  goes on as it is
    =============================================  ==============================================

    :raises BackfillStateCorrupt: what is stored cannot be read.
    """
    name = table.full_name
    state = CdcBackfillState.load(tables, view, name)
    if state is None:
        return _opened(table, CdcBackfillState(tables, name, BackfillRecord(options.version, table.source_id)), options)
    record = state.record
    if record.source_id != table.source_id:
        record.version = options.version
        made = _opened(table, CdcBackfillState(tables, name, record), options)
        made.restart()
        return made
    if not record.finished and record.version < options.version:
        return ParallelizedCdcBackfillExecutor(table, state.as_parallel(), options)
    return _opened(table, state, options)


def _opened(table: SourceTable, state: CdcBackfillState[Any], options: BackfillOptions) -> BackfillExecutor:
    if state.record.version == 1:
        return CdcBackfillExecutor(table, state, options)
    return ParallelizedCdcBackfillExecutor(table, state, options)
