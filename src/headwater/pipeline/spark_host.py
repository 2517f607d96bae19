"""The Spark session of a pipeline: made beside the other work of a start, and made anew when its Java is gone."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

from headwater.pipeline.config import PipelineConfig
from headwater.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkHost:
    """Gives the session to the queries of a pipeline; one thread.

    :param given: a session of the caller's own: it is used as it is, and never stopped.
    """

    def __init__(self, config: PipelineConfig, given: SparkSession | None = None) -> None:
        self._config = config
        self._given = given
        self._made: SparkSession | None = None
        self._problem: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._folder = config.work / "spark"

    @property
    def parallelism(self) -> int:
        """How many tasks run side by side, as far as it is known without a session."""
        found = re.fullmatch(r"local(?:\[(\*|\d+)(?:,.*)?\])?", self._config.spark.master)
        if self._given is not None:
            return int(self._given.sparkContext.defaultParallelism)
        if found is None:
            return 8
        return os.cpu_count() or 1 if found[1] == "*" else int(found[1] or 1)

    def begin(self) -> bool:
        """Make the session, in a thread of its own; whether it is made by now, or cannot be."""
        if self._given is not None or self._made is not None or self._problem is not None:
            return True
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name="headwater-spark", daemon=True)
            self._thread.start()
        return not self._thread.is_alive()

    def session(self) -> SparkSession:
        """:raises JavaMissing: Spark needs Java."""
        self.begin()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        made = self._given or self._made
        assert made is not None
        _use_here(made)
        return made

    def _make(self) -> None:
        try:
            self._clean()
            settings = {
                "spark.local.dir": str(self._folder),
                "spark.sql.warehouse.dir": str(self._folder / "warehouse"),
                "spark.scheduler.mode": "FAIR",
                "spark.ui.showConsoleProgress": "false",
            }
            made = session(
                self._config.spark.master,
                app_name=f"headwater {self._config.name}",
                checkpoints=self._config.work,
                config=settings | self._config.spark.conf,
            )
            made.sparkContext.setLogLevel("ERROR")
            self._made = made
        except BaseException as error:
            self._problem = error
            if _java_ended():  # it was killed while it started: the next try starts another one
                self.forget()

    @property
    def is_alive(self) -> bool:
        """Whether its Java still runs; true before the first session."""
        return self._made is None or _java_runs()

    def forget(self) -> None:
        """Its Java is gone: the next session starts another one."""
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        self._made = None
        gateway: Any = SparkContext._gateway
        if gateway is not None:
            gateway.shutdown()
        context: Any = SparkContext
        context._gateway = context._jvm = context._active_spark_context = None
        classes: Any = SparkSession
        classes._instantiatedSession = classes._activeSession = None

    def stop(self) -> None:
        """Stop the session that was made here; its Java may be gone already."""
        if self._thread is not None:
            self._thread.join()
        if self._made is not None:
            made, self._made = self._made, None
            try:
                made.stop()
            except Exception:
                self.forget()
        self._clean()

    def _clean(self) -> None:
        """What a killed run left behind."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _java_runs() -> bool:
    """Whether the Java that this process started runs; true where it started none."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    return process is None or process.poll() is None


def _java_ended() -> bool:
    """Whether it has ended, or does within a moment: who talks to a process that is killed may know it before."""
    end = time.monotonic() + 1.0
    while _java_runs():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _use_here(made: Any) -> None:
    """Streams find data sources of Python only in a thread that has the session as its active one."""
    if hasattr(made, "_jsparkSession"):
        type(made)._get_j_spark_session_class(made._jvm).setActiveSession(made._jsparkSession)
