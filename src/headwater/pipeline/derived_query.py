"""DerivedQuery: keeps one derived table going, with the states of every part that is looked after
(:mod:`headwater.pipeline.supervised_query`): it can be paused, resumed, retried and dropped as a sink.

Steps run in a thread of their own: a batch of Spark that takes long holds up nobody else.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from headwater import failpoints
from headwater.derive.state import FOLDER as DERIVATIONS
from headwater.pipeline.config import KEPT_KIND, DeriveSection, PipelineConfig
from headwater.pipeline.errors import CannotRewind, SinkRequestFailed
from headwater.pipeline.sink_requests import SinkWish
from headwater.pipeline.spark_host import SparkHost
from headwater.pipeline.supervised_query import STOP_SECONDS, Note, SinkState, SupervisedQuery
from headwater.sinks.delivery_record import FOLDER as DELIVERIES
from headwater.spark.failure import Failure
from headwater.spark.options import KEPT_TABLES
from headwater.state.beside import remove_beside

BEFORE_STEP = failpoints.register("pipeline.derive_before_step")
"""Before each durable step of forgetting a derived table."""


class DerivedQuery(SupervisedQuery):
    """One derived table of a pipeline."""

    kind = "derive"

    def __init__(self, config: PipelineConfig, section: DeriveSection, host: SparkHost, note: Note) -> None:
        super().__init__(config, section.label, host, note)
        self._section = section
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._problems: list[BaseException] = []

    def _look(self) -> None:
        assert self._thread is not None
        if self._thread.is_alive():
            return
        self._thread = None
        if self._problems:
            self._failed(Failure.of(self._problems[0]))
        else:  # it was to end, and that took longer than who asked for it has waited
            self.state = SinkState.STARTING

    def lost(self) -> None:
        """Nothing: the thread notices by itself, and ends."""

    def _start(self) -> None:
        function = self._section.derivation.load(Path(self._section.path or "."))
        sink = next(one for one in self._config.sink if one.label == self._section.sink).open()
        sink.check()
        self._stopping.clear()
        self._problems = []  # of this thread alone: one that did not end in time tells nobody any more
        arguments = (function, sink, self._problems)
        self._thread = threading.Thread(
            target=self._run, args=arguments, name=f"headwater-derive-{self.label}", daemon=True
        )
        self._thread.start()

    def _run(self, function: Any, sink: Any, problems: list[BaseException]) -> None:
        """In the thread."""
        from headwater.derive.runner import DerivedRunner, Place

        config, section = self._config, self._section
        place = Place(config.store, str(tables_folder(config)), config.query(section), self._host.parallelism)
        try:
            session = self._host.session(self._stopping)
            runner = DerivedRunner(place, section.derivation, function, sink, session, self._note)
            done = 0
            try:
                while not self._stopping.is_set():
                    more = runner.step()
                    self.epoch = max(self.epoch, runner.epoch)
                    if runner.batches > done:
                        self.batches += runner.batches - done
                        done = runner.batches
                        self._progressed()
                    self._stopping.wait(section.interval_seconds if more or runner.epoch else 1.0)
            finally:
                runner.close()
            if not self._stopping.is_set():
                raise RuntimeError("A derived table ended by itself.")
        except CancelledError:
            pass  # stopped while it waited for Spark
        except BaseException as error:
            problems.append(error)

    # -- requests --------------------------------------------------------------------------------------------------

    def _forget(self) -> list[str]:
        return forget_derived(self._config, self._section)

    def _let_back(self) -> list[str]:
        return []

    def _rewind(self, epoch: int | None) -> dict[str, Any]:
        raise cannot_rewind(self.label)

    def _rest(self, state: SinkState, wish: SinkWish) -> None:
        self.ask_to_stop()
        if not self._has_ended():  # it would commit, and pin, what is forgotten meanwhile
            raise SinkRequestFailed(
                f"{self.label} is in a batch that has not ended within {STOP_SECONDS:g} s.",
                next_step="Ask again: it ends with that batch.",
            )
        self._requests.put_wish(self.label, wish)
        self.state, self.failure = state, None
        self._tell(state.value)

    # -- the end ---------------------------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        self._stopping.set()

    def stop(self) -> None:
        self._has_ended()
        self._stopped()

    def _has_ended(self) -> bool:
        """Wait for its thread; whether that has ended."""
        if self._thread is None:
            return True
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            return False
        self._thread = None
        if self._problems and self.failure is None:
            self.failure = Failure.of(self._problems[0])
        return True


def tables_folder(config: PipelineConfig) -> Path:
    """Where the kept tables of the pipeline are."""
    kept = next(one for one in config.sink if one.kind == KEPT_KIND)
    return Path(kept.options.get("path") or config.work / KEPT_TABLES)


def forget_derived(config: PipelineConfig, section: DeriveSection) -> list[str]:
    """Forget all that is known of the derived table, which nobody derives now; its name. What the sink has stays.

    What a process that died left of it goes when it is done again.
    """
    from headwater.derive.runner import Place, release_pins

    query = config.query(section)
    failpoints.hit(BEFORE_STEP)
    release_pins(Place(config.store, str(tables_folder(config)), query), section.derivation)
    for folder in (DELIVERIES, DERIVATIONS):
        failpoints.hit(BEFORE_STEP)
        remove_beside(config.store, folder, query)
    return [section.derivation.full_name]


def cannot_rewind(label: str) -> CannotRewind:
    """What is said of a derived table that is to be set back."""
    return CannotRewind(
        f"{label} is a derived table: it is made anew, not set back.",
        next_step=f"Run: headwater sink drop {label} && headwater sink resume {label}",
    )
