"""Opens the backfill of a table as its state has it, or begins one."""

from __future__ import annotations

from headwater.backfill.cdc.executor import BackfillExecutor, BackfillOptions
from headwater.backfill.cdc.parallel import ParallelizedCdcBackfillExecutor
from headwater.backfill.cdc.single import CdcBackfillExecutor
from headwater.backfill.cdc.state import BackfillRecord, BackfillTables
from headwater.backfill.cdc.state_v1 import SingleState
from headwater.backfill.cdc.state_v2 import ParallelState
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
    record = tables.record(view, name)
    if record is None:
        return _opened(table, tables, options, BackfillRecord(options.version, table.source_id))
    if record.source_id != table.source_id:
        record.version = options.version
        made = _opened(table, tables, options, record)
        made.restart()
        return made
    if record.finished:
        return _opened(table, tables, options, record)
    if record.version == 2:
        state = ParallelState.load(tables, view, name)
        return ParallelizedCdcBackfillExecutor(table, tables, options, record, state)
    old = SingleState.load(tables, view, name)
    if options.version == 1:
        return CdcBackfillExecutor(table, tables, options, record, old)
    if old is not None:
        return ParallelizedCdcBackfillExecutor.continuing(table, tables, options, record, old)
    record.version = 2
    return ParallelizedCdcBackfillExecutor(table, tables, options, record)


def _opened(
    table: SourceTable, tables: BackfillTables, options: BackfillOptions, record: BackfillRecord
) -> BackfillExecutor:
    made = CdcBackfillExecutor if record.version == 1 else ParallelizedCdcBackfillExecutor
    return made(table, tables, options, record)
