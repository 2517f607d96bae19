"""The tables of the file that there is one of: what each may say, and what holds where it says nothing."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from headwater.backfill.query import QueryOptions
from headwater.capture import CaptureOptions
from headwater.databases.timeouts import TIMEOUT_SECONDS

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
SpecialValue = Literal["stop", "null", "text", "park"]
ALL_COLUMNS: Final = "*"
SpecialValueOf = Annotated[
    dict[str, SpecialValue], BeforeValidator(lambda value: {ALL_COLUMNS: value} if isinstance(value, str) else value)
]
"""By column; one policy alone is that of all columns, as is that of ``*``."""
Origin = Literal["auto", "source", "tables"]
_CAPTURE: Final = CaptureOptions()
_QUERY: Final[dict[str, Any]] = {field.name: field.default for field in fields(QueryOptions)}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PipelineSection(Section):
    """``store``: where the logs are; a directory, or an object store. ``work``: a local directory for the rest."""

    name: Name = "pipeline"
    store: str | None = None
    work: str | None = None


class SourceSection(Section):
    """The database. ``tables``: names, or patterns such as ``public.*``."""

    dsn: str | None = Field(default=None, repr=False)
    dsn_env: str | None = None
    dsn_file: str | None = None
    tables: list[str] = Field(min_length=1)
    slot: str = "headwater"
    publication: str = "headwater"
    poll: bool = False
    schema_policy: Literal["evolve", "ignore", "stop"] = "evolve"
    on_rewrite: Literal["reread", "stop"] = "reread"
    schema_check_seconds: float = Field(default=_CAPTURE.schema_check_seconds, gt=0)
    epoch_seconds: float = Field(default=_CAPTURE.epoch_seconds, gt=0)
    epoch_rows: int = Field(default=_CAPTURE.epoch_rows, ge=1)
    epoch_bytes: int = Field(default=_CAPTURE.epoch_bytes, ge=1)
    heartbeat_seconds: float = Field(default=_CAPTURE.heartbeat_seconds, gt=0)
    retry_seconds: float = Field(default=_CAPTURE.retry_seconds, gt=0)
    timeout_seconds: float = Field(default=TIMEOUT_SECONDS, ge=2)


class TableSection(Section):
    """One table. ``special_values``: what happens to values that Arrow does not have, of all columns or by column.

    ``columns``: of a collection without a schema: ``inferred``, ``document``, or names and types.
    """

    special_values: SpecialValueOf = Field(default_factory=dict)
    columns: Literal["inferred", "document"] | dict[str, str] = "inferred"


class BackfillSection(Section):
    """How the history is read; ``snapshot = false`` delivers changes only. ``from``: where a new sink has it from."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, serialize_by_alias=True)

    snapshot: bool = True
    origin: Origin = Field(default="auto", alias="from")
    mode: Literal["parallel", "single"] = "parallel"
    split_rows: int = Field(default=_QUERY["split_rows"], ge=1)
    split_kind: Literal["key", "heap"] | None = None
    interval_seconds: float = Field(default=_QUERY["interval_seconds"], gt=0)
    rows_per_second: int | None = Field(default=None, ge=0)


class SparkSection(Section):
    """The Spark that the pipeline starts. ``small_batches``: where they are staged; ``driver``: without a Spark job."""

    master: str = "local[*]"
    small_batches: Literal["spark", "driver"] = "spark"
    conf: dict[str, str] = Field(default_factory=dict)


class LimitsSection(Section):
    """Of changes in one batch; an epoch is never divided."""

    max_rows: int | None = Field(default=None, ge=1)
    max_epochs: int | None = Field(default=None, ge=1)
