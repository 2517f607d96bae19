"""Verification: all tables of a pipeline, at each of its sinks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from headwater.backfill.control import status
from headwater.backfill.log_ranges import described_tables
from headwater.backfill.progress import Phase
from headwater.errors import ConflictError, InputError
from headwater.pipeline.config import PipelineConfig, SinkSection, matching
from headwater.pipeline.errors import NotStarted
from headwater.pipeline.verify.check import Findings, Mirror, Options, check_table
from headwater.pipeline.verify.delivery import QueryDelivery
from headwater.pipeline.verify.mirrors import mirror_of
from headwater.sources.snapshots import open_snapshots
from headwater.sources.table import SourceTable
from headwater.state.errors import StoreNotFound

Progress = Callable[[str, str, int, int], None]
"""Sink, table, rows that were read, rows in all."""


@dataclass(frozen=True, slots=True)
class Target:
    """One table at one sink."""

    sink: str
    table: SourceTable
    mirror: Mirror
    delivery: QueryDelivery


class Verification:
    """The comparison of a pipeline's tables with what its sinks show.

    :param tables: names or patterns; all by default. :param sinks: labels of sinks; all by default.
    :raises InputError: there is no such table or sink. :raises ConflictError: the history of one is still being read.
    """

    def __init__(self, config: PipelineConfig, tables: Sequence[str] = (), sinks: Sequence[str] = ()) -> None:
        self._source = open_snapshots(config.dsn)
        self.targets = list(_targets(config, tables, sinks))

    def wait(self, seconds: float) -> bool:
        """Wait until the sinks show all that has committed at the source by now; whether they do."""
        deadline = time.monotonic() + seconds
        with closing(self._source.export()) as snapshot:
            high = snapshot.mark.high
        return all(target.delivery(high, max(0.0, deadline - time.monotonic())) for target in self.targets)

    def run(self, options: Options | None = None, progress: Progress | None = None) -> Iterator[Findings]:
        """Compare one table after the other.

        :raises SourceUnreachable: no answer.
        """
        for target in self.targets:
            yield self._check(target, options, progress)

    def _check(self, target: Target, options: Options | None, progress: Progress | None) -> Findings:
        def told(done: int, total: int) -> None:
            if progress is not None:
                progress(target.sink, target.table.full_name, done, total)

        found = check_table(self._source, target.table, target.mirror, target.delivery, options, told)
        return replace(found, sink=target.sink)


def _targets(config: PipelineConfig, tables: Sequence[str], sinks: Sequence[str]) -> Iterator[Target]:
    labels = [sink.label for sink in config.sink]
    for label in sinks:
        if label not in labels:
            raise InputError(f"The pipeline has no sink {label!r}.", next_step=f"Valid are {', '.join(labels)}.")
    try:
        described = {table.full_name: table for table in described_tables(config.store)}
        captured = list(described)
    except StoreNotFound:
        raise NotStarted("The pipeline has never run: nothing to compare.", next_step="Run: headwater run") from None
    for pattern in tables:
        if not matching([pattern], captured, config.home):
            raise InputError(f"The pipeline has no table {pattern}.", next_step=f"Valid are {', '.join(captured)}.")
    for section in config.sink:
        if sinks and section.label not in sinks:
            continue
        opened = section.open()
        for name in matching(tables or ["*"], matching(section.tables, captured, config.home), config.home):
            _check_history(config, section, name)
            query = config.query(section)
            delivery = QueryDelivery(config.store, config.state, query, opened, described[name])
            yield Target(section.label, described[name], mirror_of(opened), delivery)


def _check_history(config: PipelineConfig, sink: SinkSection, table: str) -> None:
    told = status(config.state, config.query(sink))
    phase = None if told is None else told.value["tables"].get(table, {}).get("phase")
    if phase != Phase.DONE:
        raise ConflictError(
            f"The history of {table} is not in sink {sink.label!r} yet (it is {phase or 'waiting'}).",
            next_step="Wait until headwater status shows it as live; other tables can be chosen with --table.",
        )
