"""DerivedQuery: the delivery loop of one derived table. It can be paused, resumed, retried and dropped as a sink."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

from headwater import failpoints
from headwater.pipeline.config import KEPT_KIND, DeriveSection, PipelineConfig
from headwater.pipeline.errors import CannotRewind, SinkRequestFailed
from headwater.pipeline.sink_control import SinkControl
from headwater.pipeline.sink_query import LoopQuery, LoopThread
from headwater.pipeline.spark_host import SparkHost
from headwater.pipeline.supervised_query import Note, SinkState
from headwater.spark.jobs import FrameJobs
from headwater.spark.options import KEPT_TABLES
from headwater.state.query_store import open_query_store

BEFORE_STEP = failpoints.register("pipeline.derive_before_step")
"""Before each durable step of forgetting a derived table."""


class DerivedQuery(LoopQuery):
    """One derived table of a pipeline."""

    kind = "derive"

    def __init__(
        self, config: PipelineConfig, section: DeriveSection, host: SparkHost, note: Note, control: SinkControl
    ) -> None:
        super().__init__(config, section.label, host, note, control)
        self._section = section

    def _open(self, stop: threading.Event) -> LoopThread:
        from headwater.derive.delivery import DerivedDelivery

        config, section = self._config, self._section
        query, session = config.query(section), cache(lambda: self._host.session(stop))

        def delivery() -> DerivedDelivery:
            function = section.derivation.load(Path(section.path or "."))
            sink = next(one for one in config.sink if one.label == section.sink).open()
            sink.check()
            return DerivedDelivery(
                query,
                config.store,
                config.state,
                str(tables_folder(config)),
                section.derivation,
                function,
                sink,
                session,
                self._note,
                section.interval_seconds,
            )

        return LoopThread(delivery, query, FrameJobs(session, query), stop)

    # -- requests --------------------------------------------------------------------------------------------------

    def _forget(self) -> list[str]:
        return forget_derived(self._config, self._section)

    def _let_back(self) -> list[str]:
        return []

    def _rewind(self, epoch: int | None) -> dict[str, Any]:
        raise cannot_rewind(self.label)

    def _rest(self, state: SinkState) -> None:
        running = self._running
        if running is not None:
            running.stop()
            if running.is_alive:  # what is forgotten meanwhile could be pinned again
                raise SinkRequestFailed(
                    f"{self.label} is in a batch that has not ended yet, though its Spark job was cancelled.",
                    next_step="Ask again: it ends with that batch.",
                )
        super()._rest(state)


def tables_folder(config: PipelineConfig) -> Path:
    """Where the kept tables of the pipeline are."""
    kept = next(one for one in config.sink if one.kind == KEPT_KIND)
    return Path(kept.options.get("path") or config.work / KEPT_TABLES)


def forget_derived(config: PipelineConfig, section: DeriveSection) -> list[str]:
    """Forget all that is known of the derived table, which nobody derives now; its name. What the sink has stays.

    What a process that died left of it goes when it is done again.
    """
    from headwater.derive.planner import release_pins

    query = config.query(section)
    failpoints.hit(BEFORE_STEP)
    release_pins(config.store, str(tables_folder(config)), query, section.derivation.tables)
    failpoints.hit(BEFORE_STEP)
    with open_query_store(config.state, query, takeover=True) as store:
        store.clear()
    return [section.derivation.full_name]


def cannot_rewind(label: str) -> CannotRewind:
    """What is said of a derived table that is to be set back."""
    return CannotRewind(
        f"{label} is a derived table: it is made anew, not set back.",
        next_step=f"Run: headwater sink drop {label} && headwater resume --sink {label}",
    )
