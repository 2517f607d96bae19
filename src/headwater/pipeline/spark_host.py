"""The Spark of a pipeline: started beside the other work of a start, and again when its Java has ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwater.errors import HeadwaterError
from headwater.pipeline.config import PipelineConfig
from headwater.spark.java import forget_java, java_ended, java_runs, kill_java
from headwater.spark.session import context, launch, prepare_in_background, session
from headwater.spark.spark_version import check_spark

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

LEAN_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xms64m"
"""Rows do not pass through the Java of a pipeline, unless it derives tables: it schedules tasks. The second compiler
would take half of the processor time of a start, and the default collector, with a heap of a part of the machine, 200
MB of memory."""
_POLL_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 60.0
"""Java has this long to end, and to start before that; then it is killed."""
_KILL_SECONDS: Final = 5.0


def launch_spark(config: PipelineConfig) -> None:
    """Start the Java of the pipeline in another thread. :class:`SparkHost` reports why it cannot be started."""

    def run() -> None:
        with suppress(Exception):
            launch(config.spark.master, **_settings(config))

    threading.Thread(target=run, name="headwater-java", daemon=True).start()


class SparkHost:
    """Gives the queries of a pipeline what runs their jobs; any thread.

    :param given: a session of the caller: it is used as it is, and never stopped.
    :raises SparkMissing: PySpark is not installed. :raises UnsupportedSpark: its version is not supported.
    """

    def __init__(self, config: PipelineConfig, given: SparkSession | None = None) -> None:
        check_spark()
        self._config = config
        self._given = given
        self._lock = threading.Lock()
        self._attempt: Future[SparkContext | SparkSession] | None = None
        self._preparation: subprocess.Popen[bytes] | None = None
        replaced = "spark.driver.extraJavaOptions" in config.spark.conf
        self._has_prepared = given is not None or replaced or not config.spark.master.startswith("local")
        if given is not None:
            self._attempt = Future()
            self._attempt.set_result(given)

    def begin(self) -> Future[SparkContext | SparkSession]:
        """Start Spark in another thread, unless it runs or is being started."""
        with self._lock:
            if self._attempt is None:
                self._attempt = Future()
                arguments = (self._attempt,)
                threading.Thread(target=self._make, args=arguments, name="headwater-spark", daemon=True).start()
            return self._attempt

    def spark(self, stop: threading.Event | None = None) -> SparkContext | SparkSession:
        """What runs jobs: a context, or the session of the caller. It is waited for until *stop* is set.

        The next call after a failure tries again.

        :raises JavaMissing: Spark needs Java. :raises CancelledError: *stop* was set.
        """
        attempt = self.begin()
        while not attempt.done():
            if stop is not None and stop.is_set():
                raise CancelledError
            wait([attempt], _POLL_SECONDS)
        try:
            return attempt.result()
        except BaseException:
            with self._lock:
                if self._attempt is attempt:
                    self._attempt = None
            raise

    def session(self, stop: threading.Event | None = None) -> SparkSession:
        """The session, for those who need more than jobs. See :meth:`spark`."""
        self.spark(stop)
        return self._given or session(self._config.spark.master, **_settings(self._config))

    def _make(self, attempt: Future[SparkContext | SparkSession]) -> None:
        try:
            self._clean()
            made = context(self._config.spark.master, **_settings(self._config))
            made.setLogLevel("ERROR")
        except BaseException as error:
            try:
                if java_ended():  # it was killed while it started: the next try starts another one
                    forget_java()
            finally:
                attempt.set_exception(error)
        else:
            attempt.set_result(made)

    @property
    def is_alive(self) -> bool:
        """Whether its Java still runs; true before the first start."""
        return self._made is None or java_runs()

    @property
    def _made(self) -> SparkContext | SparkSession | None:
        """The context that was created here."""
        attempt = self._attempt
        if self._given is not None or attempt is None or not attempt.done() or attempt.exception() is not None:
            return None
        return attempt.result()

    def forget(self) -> None:
        """Its Java has ended: the next call of :meth:`spark` starts another one."""
        with self._lock:
            self._attempt = None
        forget_java()

    def prepare_next_start(self) -> None:
        """Create the archive of Spark's classes in the background, if there is none. Later calls notice its end."""
        if not self._has_prepared:
            self._has_prepared = True
            with suppress(HeadwaterError, OSError):
                self._preparation = prepare_in_background()
        elif self._preparation is not None and self._preparation.poll() is not None:
            self._preparation = None

    def stop(self) -> None:
        """Stop what was started here; its Java may have ended already."""
        if self._preparation is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._preparation.pid, signal.SIGKILL)
            self._preparation.wait()
            self._preparation = None
        if self._given is None and self._attempt is not None:
            ending = threading.Thread(target=self._end, args=(self._attempt,), name="headwater-spark-end", daemon=True)
            ending.start()
            ending.join(_STOP_SECONDS)
            if ending.is_alive():
                kill_java()
                ending.join(_KILL_SECONDS)
                forget_java()
            self._attempt = None
        self._clean()

    def _end(self, attempt: Future[SparkContext | SparkSession]) -> None:
        """Wait for the start, and end what was started: a Java that is frozen answers neither."""
        attempt.exception()
        made = self._made
        if made is not None:
            try:
                _stop(made)
            except Exception:
                forget_java()

    def _clean(self) -> None:
        """Remove what a killed run left behind."""
        shutil.rmtree(_folder(self._config), ignore_errors=True)


def _folder(config: PipelineConfig) -> Path:
    return config.work / "spark"


def _settings(config: PipelineConfig) -> dict[str, Any]:
    """Parameters of :func:`~headwater.spark.session.session`."""
    conf = {
        "spark.local.dir": str(_folder(config)),
        "spark.sql.warehouse.dir": str(_folder(config) / "warehouse"),
        "spark.scheduler.mode": "FAIR",
        "spark.ui.showConsoleProgress": "false",
    }
    return {
        "app_name": f"headwater {config.name}",
        "checkpoints": config.work,
        "config": conf | config.spark.conf,
        "java_options": "" if config.derive else LEAN_JAVA,
    }


def _stop(made: Any) -> None:
    from pyspark.sql import SparkSession

    created: Any = SparkSession
    (created._instantiatedSession or made).stop()
