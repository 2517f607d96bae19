"""All settings of one pipeline, as those who run it ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from headwater.backfill.query import QueryOptions
from headwater.capture import CaptureOptions
from headwater.capture.options import OnRewrite
from headwater.pipeline.config.parts import KEPT_KIND, DeriveSection, SinkSection
from headwater.pipeline.config.patterns import matching
from headwater.pipeline.config.sections import (
    ALL_COLUMNS,
    BackfillSection,
    LimitsSection,
    PipelineSection,
    Section,
    SourceSection,
    SparkSection,
    TableSection,
)
from headwater.sinks.sink import Mode
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.open import full_name, home_of
from headwater.sources.splits import SplitKind
from headwater.sources.table import SpecialValues
from headwater.state.query_store import pipeline_state


class PipelineConfig(Section):
    """All settings of one pipeline, checked. ``sink`` and ``table`` are named as the file spells them."""

    pipeline: PipelineSection = PipelineSection()
    source: SourceSection
    table: dict[str, TableSection] = Field(default_factory=dict)
    sink: list[SinkSection] = Field(default_factory=list)
    derive: list[DeriveSection] = Field(default_factory=list)
    backfill: BackfillSection = BackfillSection()
    spark: SparkSection = SparkSection()
    limits: LimitsSection = LimitsSection()

    @property
    def name(self) -> str:
        return self.pipeline.name

    @property
    def parts(self) -> tuple[SinkSection | DeriveSection, ...]:
        """What is delivered to: the sinks, then the derived tables. Each has its own label."""
        return (*self.sink, *self.derive)

    @property
    def dsn(self) -> str:
        """The connection string; secret."""
        assert self.source.dsn is not None
        return self.source.dsn

    @property
    def home(self) -> str:
        """The schema or database of tables that are named alone."""
        return home_of(self.dsn)

    @property
    def store(self) -> str:
        """The location of the capture's store, and of all that is beside it."""
        assert self.pipeline.store is not None
        return self.pipeline.store

    @property
    def work(self) -> Path:
        """A local directory for what is no store: locks, the journal, spilled transactions."""
        assert self.pipeline.work is not None
        return Path(self.pipeline.work)

    @property
    def logs(self) -> Path:
        """The directory of what the processes of the pipeline print."""
        return self.work / "logs"

    @property
    def capture_options(self) -> CaptureOptions:
        source = self.source
        return CaptureOptions(
            epoch_seconds=source.epoch_seconds,
            epoch_rows=source.epoch_rows,
            epoch_bytes=source.epoch_bytes,
            heartbeat_seconds=source.heartbeat_seconds,
            retry_seconds=source.retry_seconds,
            schema_policy=SchemaPolicy(source.schema_policy),
            schema_check_seconds=source.schema_check_seconds,
            on_rewrite=OnRewrite(source.on_rewrite),
        )

    @property
    def special_values(self) -> dict[str, SpecialValues]:
        """By ``schema.table.column``, or by ``schema.table`` for all its columns."""
        found: dict[str, SpecialValues] = {}
        for name, section in self.table.items():
            table = full_name(self.dsn, name) if section.special_values else name
            for column, policy in section.special_values.items():
                found[table if column == ALL_COLUMNS else f"{table}.{column}"] = SpecialValues(policy)
        return found

    @property
    def columns(self) -> dict[str, str]:
        """Of collections without a schema, by name: how their columns are found."""
        return {
            table: section.columns if isinstance(section.columns, str) else _struct(section.columns)
            for table, section in self.table.items()
            if section.columns != "inferred"
        }

    def query(self, sink: SinkSection | DeriveSection) -> str:
        """The name of the query that delivers to *sink*, or derives."""
        return f"{self.name}-{sink.label}"

    @property
    def state(self) -> str:
        """The location of the pipeline store: what the queries of all sinks know for good."""
        return pipeline_state(self.store, self.name)

    def dead_letters(self, sink: SinkSection) -> Path:
        """Where the rows are that *sink* refused."""
        return self.work / "dead_letters" / sink.label

    def kept_tables(self, sink: SinkSection) -> str | None:
        """The folder of kept tables that the history of *sink* can come from; ``None``: there are none."""
        if sink.kind == KEPT_KIND:
            return None
        return next((str(one.options["path"]) for one in self.sink if one.kind == KEPT_KIND), None)

    def query_options(self, sink: SinkSection, tables: Sequence[str]) -> QueryOptions:
        """What the query of *sink* does, for those of *tables* that it takes."""
        backfill = self.backfill
        return QueryOptions(
            store=self.store,
            source=self.dsn,
            query=self.query(sink),
            tables=tuple(matching(sink.tables, tables, self.home)),
            history=backfill.snapshot and sink.since is None,
            kept=self.kept_tables(sink),
            origin="source" if sink.kind == KEPT_KIND else sink.origin or backfill.origin,
            since=sink.since_text,
            new_columns=self.source.schema_policy != "ignore",
            backfill=backfill.mode,
            split_rows=backfill.split_rows,
            split_kind=None if backfill.split_kind is None else SplitKind(backfill.split_kind),
            keyed=sink.delivery is Mode.MIRROR,
            takes_columns=True,
            interval_seconds=backfill.interval_seconds,
            rows_per_second=backfill.rows_per_second,
            max_rows=self.limits.max_rows,
            max_epochs=self.limits.max_epochs,
            state=self.state,
        )


def _struct(columns: Mapping[str, str]) -> str:
    """Names and types as one type."""
    return f"struct<{', '.join(f'`{name}`: {kind}' for name, kind in columns.items())}>"
