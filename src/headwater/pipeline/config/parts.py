"""What a pipeline delivers to: its sinks and its derived tables, one section of the file for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field

from headwater.derive.derivation import Derivation
from headwater.pipeline.config.sections import Name, Origin, Section
from headwater.sinks.open import default_mode, open_sink
from headwater.sinks.sink import Mode, Sink

KEPT_KIND: Final = "table"
"""The kind of sink that keeps tables, for all that is made of them later."""


class SinkSection(Section):
    """One place of delivery. ``tables``: those of the source that go there; all by default.

    ``bad_rows``: what happens to a row that the sink refuses. ``from``: where its history comes from, if not as
    ``[backfill]`` says. ``since``: no history, and changes from an epoch or a time on. ``kind`` is one of ours, or
    ``module:Class``; the other keys are the options of that kind.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, serialize_by_alias=True)

    kind: str
    name: Name | None = None
    mode: Literal["mirror", "changes", "history"] | None = None
    tables: list[str] = Field(default_factory=lambda: ["*"], min_length=1)
    bad_rows: Literal["stop", "park"] = "stop"
    origin: Origin | None = Field(default=None, alias="from")
    since: str | int | datetime | None = None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Without its options: some of them are secret."""
        return ((name, getattr(self, name)) for name in type(self).model_fields)

    @property
    def label(self) -> str:
        """Its name; its kind where it has none."""
        return self.name or self.kind.rpartition(":")[2]

    @property
    def delivery(self) -> Mode:
        return default_mode(self.kind) if self.mode is None else Mode(self.mode)

    @property
    def since_text(self) -> str | None:
        """The epoch, or the time, as text."""
        if self.since is None:
            return None
        return self.since.isoformat() if isinstance(self.since, datetime) else str(self.since)

    @property
    def options(self) -> dict[str, Any]:
        """What its kind has more."""
        return dict(self.model_extra or {})

    def open(self) -> Sink:
        """:raises SinkInputError: it cannot be what it says."""
        return open_sink(self.kind, **self.options, mode=self.delivery)

    @property
    def place(self) -> str:
        """Where it delivers to, without secrets."""
        return self.open().name.partition(":")[2]


class DeriveSection(Section):
    """A derived table: ``function`` over ``tables``, which a sink of kind ``table`` keeps, delivered to ``sink``.

    ``by``: the columns that it goes by, of all tables or by the name of each. ``key``: of its rows; ``by`` otherwise.
    ``path``: where the module of the function is; beside the file by default.
    """

    name: Name
    function: str | Callable[..., Any]
    tables: list[str] = Field(min_length=1)
    by: list[str] | dict[str, list[str]]
    key: list[str] = Field(default_factory=list)
    sink: str | None = None
    path: str | None = None
    interval_seconds: float = Field(default=5.0, gt=0)

    @property
    def label(self) -> str:
        return self.name

    @property
    def derivation(self) -> Derivation:
        """:raises InvalidDerivation: it cannot be one."""
        return Derivation.of(self.name, self.function, self.tables, self.by, self.key)
