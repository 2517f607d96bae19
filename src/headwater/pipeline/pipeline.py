"""Pipeline: a database into sinks, from Python.

>>> from headwater import Pipeline                                             # doctest: +SKIP
>>> pipeline = Pipeline(source="postgresql://app@db/shop", tables=["public.*"])  # doctest: +SKIP
>>> pipeline.sink("delta", path="lake").run()                                  # doctest: +SKIP
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from headwater.control.command import AddTables, DropSink, RetrySink, RewindSink
from headwater.control.request import Request, ask_capture
from headwater.errors import HeadwaterError, InputError
from headwater.pipeline import commands, sink_commands
from headwater.pipeline.commands import Outcome
from headwater.pipeline.config import DEFAULT_FILE, PipelineConfig, configure, load, plain
from headwater.pipeline.errors import AlreadyRunning, NotStarted, PipelineFailed
from headwater.pipeline.status import PipelineStatus, read_status
from headwater.pipeline.supervision import Supervisor
from headwater.pipeline.tables import source_of
from headwater.pipeline.verify import Findings, Options, Verification

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_START_SECONDS = 0.05


class Pipeline:
    """One database, its tables, and the sinks that they go to.

    :param source: the connection string, or the keys of ``[source]`` in ``pipeline.toml``.
    :param tables: names, or patterns such as ``public.*``.
    :param store: where logs and state are kept; ``headwater/<name>`` by default.
    :param settings: the other tables of ``pipeline.toml``: ``backfill={"split_rows": 50_000}``, ``spark={…}``.
    :raises ConfigError: a key or value that is not valid.
    """

    def __init__(
        self,
        source: str | Mapping[str, Any],
        tables: Sequence[str] = (),
        *,
        store: str | Path | None = None,
        name: str = "pipeline",
        **settings: Mapping[str, Any],
    ) -> None:
        told: dict[str, Any] = {"dsn": source} if isinstance(source, str) else dict(source)
        if tables:
            told["tables"] = list(tables)
        section: dict[str, Any] = {"name": name} | ({} if store is None else {"store": str(store)})
        self._settings: dict[str, Any] = {"pipeline": section, "source": told, "sink": [], "derive": [], **settings}
        self._begin(configure(self._settings))

    @classmethod
    def from_toml(cls, path: str | Path = DEFAULT_FILE) -> Self:
        """The pipeline that a file describes.

        :raises ConfigNotFound: there is no such file. :raises ConfigError: it cannot be used.
        """
        made = cls.of(load(path))
        made._file = Path(path)
        return made

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """The pipeline of settings that were checked already."""
        made = cls.__new__(cls)
        made._settings = plain(config.model_dump(exclude_none=True))
        made._begin(config)
        return made

    def _begin(self, config: PipelineConfig) -> None:
        self.config = config
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        self._refusal: BaseException | None = None
        self._file: Path | None = None

    def sink(self, kind: str, **options: Any) -> Self:
        """Deliver to one more place; the keys of ``[[sink]]``.

        :raises ConfigError: a key or value that is not valid.
        """
        sinks = [*self._settings["sink"], {"kind": kind, **_texts(options)}]
        config = configure({**self._settings, "sink": sinks})
        self._settings["sink"], self.config = sinks, config
        return self

    def derive(
        self,
        name: str,
        function: str | Callable[..., DataFrame],
        tables: Sequence[str],
        *,
        by: Sequence[str] | Mapping[str, Sequence[str]],
        key: Sequence[str] = (),
        sink: str | None = None,
        **options: Any,
    ) -> Self:
        """Maintain ``derived.<name>``: what *function* makes of tables that a sink of kind ``table`` keeps.

        :param function: takes a DataFrame for each of *tables* and gives one; or ``module:function``.
        :param by: the columns that it goes by, of all tables or by the name of each; docs/derive.md says which can be.
        :param key: of its rows; *by* where it is not given. :param sink: to which it is delivered; the only one.
        :raises ConfigError: a key or value that is not valid.
        """
        keys = _keys_of_derivation(name, function, tables, by, {"key": list(key), "sink": sink, **options})
        derived = [*self._settings["derive"], keys]
        config = configure({**self._settings, "derive": derived})
        self._settings["derive"], self.config = derived, config
        return self

    def start(self, spark: SparkSession | None = None) -> Self:
        """Run it in the background.

        :param spark: a session to use; one is made otherwise, and ended with the pipeline.
        :raises AlreadyRunning: it is run by another process, or here. :raises ConfigError: it has no sink.
        :raises SparkMissing: PySpark is not installed. :raises UnsupportedSpark: its version is not supported.
        """
        if self._thread is not None and self._thread.is_alive():
            raise AlreadyRunning(str(self.config.work), "this process", 0)
        supervisor = self._supervisor = Supervisor(self.config, spark, self._file)
        _load_drivers(self.config)
        self._refusal = None
        begun = threading.Event()

        def run() -> None:
            try:
                supervisor.run(begun)
            except BaseException as error:
                self._refusal = error
            finally:
                begun.set()

        self._thread = threading.Thread(target=run, name="headwater-pipeline", daemon=True)
        self._thread.start()
        begun.wait()
        self._raise_refusal()
        return self

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    @property
    def is_running(self) -> bool:
        """Whether it runs in this process."""
        return self._thread is not None and self._thread.is_alive()

    def ask_to_stop(self) -> None:
        """Begin to stop, without waiting; also from a signal handler."""
        if self._supervisor is not None:
            self._supervisor.stop()

    def stop(self) -> None:
        """End cleanly and wait: batches end, the capture seals; also where another process runs it.

        :raises NotStarted: no process runs it. :raises PipelineFailed: it had failed; what to do.
        """
        if self._thread is None:
            commands.stop(self._current_config)
            return
        self.ask_to_stop()
        self.wait()

    # -- what can be asked, wherever it runs; docs/pipeline.md ---------------------------------------------------------

    def pause(self, table: str | None = None, sink: str | None = None, backfill: bool = False) -> list[Outcome]:
        """Deliver nothing to *sink*, or to all, until :meth:`resume`; or pause only the reading of backfills.

        :param table: of which the backfill is paused.
        :raises InputError: the delivery of one table cannot be paused. :raises RequestFailed: it cannot be done.
        """
        return commands.pause(self._current_config, table, sink, backfill=backfill)

    def resume(self, table: str | None = None, sink: str | None = None, backfill: bool = False) -> list[Outcome]:
        """Undo :meth:`pause`. A sink that is named and was dropped begins again."""
        return commands.resume(self._current_config, table, sink, backfill=backfill)

    def throttle(self, rows_per_second: int | None, table: str | None = None, sink: str | None = None) -> list[Outcome]:
        """Read at most this many rows of backfill per second, for each table; ``None``: no limit."""
        return commands.throttle(self._current_config, rows_per_second, table, sink)

    def resnapshot(
        self,
        table: str | None = None,
        sink: str | None = None,
        *,
        start: Sequence[str] = (),
        end: Sequence[str] = (),
        columns: Sequence[str] = (),
    ) -> list[Outcome]:
        """Read a table once more, or a range of its keys (both included), or some of its columns."""
        return commands.resnapshot(self._current_config, table, sink, start=start, end=end, columns=columns)

    def retry(self, sink: str) -> None:
        """Start a sink that failed, now; the tables that it parked return."""
        commands.steer(self._current_config, RetrySink(sink))

    def rewind(self, sink: str, epoch: int | None = None) -> None:
        """Deliver again what came after *epoch*; ``None``: what the sink lacks. :raises RequestFailed: it cannot be."""
        commands.steer(self._current_config, RewindSink(sink, epoch))

    def drop(self, sink: str) -> None:
        """Forget all that is known of a sink; what it has stays there."""
        commands.steer(self._current_config, DropSink(sink))

    def add_sink(self, kind: str, **options: Any) -> str:
        """Deliver to one more place, also while it runs; the keys of ``[[sink]]``, which its file gets. Its name.

        :raises InputError: it is not from a file. :raises ConfigError: a key or value that is not valid.
        """
        section = sink_commands.add_sink(self._own_file, kind, _texts(options))
        self._take_file()
        return section.label

    def add_derivation(
        self,
        name: str,
        function: str,
        tables: Sequence[str],
        *,
        by: Sequence[str] | Mapping[str, Sequence[str]],
        **options: Any,
    ) -> str:
        """Maintain one more table, also while it runs: as :meth:`derive`, for a pipeline from a file. Its name.

        :param function: ``module:function``.
        :raises InputError: it is not from a file. :raises ConfigError: a key or value that is not valid.
        """
        keys = _keys_of_derivation(name, function, tables, by, options)
        section = sink_commands.add_derivation(self._own_file, keys)
        self._take_file()
        return section.label

    def add_table(self, *tables: str) -> None:
        """Have the running capture keep the changes of more tables, for streams that read them.

        Sinks get the tables of the settings. :raises RequestFailed: there is no such table, or it cannot be captured.
        """
        ask_capture(self._current_config.store, AddTables(tables))

    def dead_letters(self, sink: str) -> dict[str, pa.Table]:
        """The rows that a sink refused and that were parked, with the reasons, by the name of their table."""
        return sink_commands.dead_letters(self._current_config, sink)

    def replay(self, sink: str) -> dict[str, int]:
        """Read the rows once more that a sink refused, as they are now; how many of each table.

        :raises NotStarted: no process runs the pipeline.
        """
        return sink_commands.replay(self._current_config, sink)

    def verify(
        self, tables: Sequence[str] = (), sinks: Sequence[str] = (), *, wait: float = 60.0, keys: int = 0
    ) -> list[Findings]:
        """Compare every row of the source with what the sinks show, while both move. Changes nothing.

        :param tables: names or patterns; all by default. :param sinks: their names; all by default.
        :param wait: seconds to wait for a sink that is behind. :param keys: how many keys of differences to return.
        :raises InputError: there is no such table or sink. :raises ConflictError: history is still being read.
        """
        options = Options(patience=wait, keys=keys)
        return list(Verification(self._current_config, tables, sinks).run(options))

    @property
    def _own_file(self) -> Path:
        if self._file is None:
            raise InputError(
                "The pipeline is not from a file, to which this could be added.",
                next_step="Use Pipeline.from_toml(), or sink() and derive() before start().",
            )
        return self._file

    def _take_file(self) -> None:
        """Use the settings that the file has now, from the next start on; a process that runs it has taken them."""
        self.config = load(self._own_file)
        self._settings = plain(self.config.model_dump(exclude_none=True))

    def requests(self) -> list[Request]:
        """What was asked and is not done yet."""
        return [request for _, request in commands.requests(self._current_config)]

    def withdraw(self, request: str) -> None:
        """Take back the request with this id. :raises NoSuchRequest: it is done. :raises RequestBegun: it has begun."""
        commands.withdraw(self._current_config, request)

    @property
    def _current_config(self) -> PipelineConfig:
        """With the sinks that were added while it runs."""
        return self.config if self._supervisor is None else self._supervisor.config

    def wait(self, seconds: float | None = None) -> bool:
        """Until it has ended, or *seconds* are over; whether it has ended.

        :raises NotStarted: it was not started here. :raises PipelineFailed: a part of it needs a person.
        """
        if self._thread is None or self._supervisor is None:
            raise NotStarted("The pipeline was not started here.", next_step="Call start() first.")
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._raise_refusal()
        failure = self._supervisor.failure
        if failure is not None:
            raise PipelineFailed(failure.message, next_step=failure.next_step)
        return True

    def run(self, spark: SparkSession | None = None) -> None:
        """Run it until Ctrl-C, or until something needs a person.

        :raises PipelineFailed: what to do is its next step.
        """
        self.start(spark)
        try:
            while not self.wait(0.5):
                pass
        except KeyboardInterrupt:
            self.stop()

    def wait_until_live(self, seconds: float = 600.0) -> bool:
        """Until all history and all changes so far are delivered; ``False`` when that took longer.

        :raises PipelineFailed: a part of it needs a person.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.wait(_START_SECONDS):
                return False
            found = self.status()
            if found.is_live and not found.lag_rows:
                return True
            time.sleep(0.2)
        return False

    def status(self) -> PipelineStatus:
        """How it is; also when another process runs it, or nobody."""
        return read_status(self._current_config)


def _texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """*options* with paths as texts."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}


def _keys_of_derivation(
    name: str,
    function: str | Callable[..., DataFrame],
    tables: Sequence[str],
    by: Sequence[str] | Mapping[str, Sequence[str]],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The keys of ``[[derive]]``."""
    columns = {table: list(one) for table, one in by.items()} if isinstance(by, Mapping) else list(by)
    keys = {"name": name, "function": function, "tables": list(tables), "by": columns, **options}
    return {key: value for key, value in keys.items() if value is not None}


def _load_drivers(config: PipelineConfig) -> None:
    """Import the drivers of the source and of the sinks here, before there are threads that need them.

    Python raises "deadlock detected" in one of two threads that import a package and a module of it at the same time.
    """
    with suppress(HeadwaterError):  # the part that needs a driver reports that it is missing
        source_of(config)
    for section in config.sink:
        with suppress(HeadwaterError):
            section.place  # noqa: B018 - it opens the sink
