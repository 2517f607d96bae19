"""A Spark session with the settings under which small batches are fast, and ``hot`` for the code that they run.

>>> from headwater.spark.session import session              # doctest: +SKIP
>>> spark = session("local[2]", checkpoints="/var/lib/shop")  # doctest: +SKIP

What they bring was measured on two cores, per micro-batch with a Python source and a Python sink: 205 ms without them,
some 75 ms with them; for a cold start (session, first job, first batch) see ``docs/spark.md``.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit
from zipimport import zipimporter

from headwater.spark.directories import cache_directory
from headwater.spark.spark_version import check_spark, installed_spark, minor_version
from headwater.system.files import UnsafeDirectory, make_root

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


_LINKED: Final = ("bin", "data", "jars", "licenses", "sbin")
_TRIED: Final = ((3, 5), (4, 0), (4, 1), (4, 2), (4, 3))
"""Versions of pyspark with which this was tried."""


def linked_home() -> Path | None:
    """A SPARK_HOME without ``python/`` for the pyspark that is installed; ``None`` where it would not work.

    A Spark from a wheel brings pyspark twice: as a package, and as ``python/lib/pyspark.zip``, which it puts first on
    the path of every worker. Nothing in the archive is compiled, so each one compiles what it imports: 0.6 s instead of
    0.1 s per process. In a directory with links to everything else of the wheel, the archive is not found, and the
    package is. It is created when it is not there.
    """
    import pyspark

    package = Path(pyspark.__file__).resolve().parent
    version = tuple(int(part) for part in pyspark.__version__.split(".")[:2] if part.isdigit())
    if version not in _TRIED or not (package / "jars").is_dir() or not (package / "bin" / "spark-submit").is_file():
        return None
    name = hashlib.sha256(str(package).encode()).hexdigest()[:12]
    home = cache_directory() / f"spark-{pyspark.__version__}-{name}"
    try:
        make_root(home)  # Spark runs what is in it
        for part in _LINKED:
            if (package / part).is_dir():
                _link(home / part, package / part)
    except (OSError, UnsafeDirectory):
        return None
    return home


def _link(link: Path, target: Path) -> None:
    """Make it, also when others do the same right now."""
    if link.is_symlink() and link.readlink() == target:
        return
    made = link.with_name(f".{link.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    made.symlink_to(target)
    made.replace(link)


FAST: Final[Mapping[str, str]] = {
    "spark.python.unix.domain.socket.enabled": "true",  # by TCP each Python task waits 40 ms for an acknowledgement
    "spark.sql.session.timeZone": "UTC",  # batches for Python writers come in the session's time zone
    "spark.ui.enabled": "false",
    # explain() of a stream shows its options, and the option source can hold a password
    "spark.sql.redaction.string.regex": r"(?i)(?<=://)[^\s/@]+(?=@)|(?<=password=)[^\s&,)]+",
}
"""Settings for every session."""

_SECRET: Final = re.compile("secret|password|token|access[.]?key", re.IGNORECASE)
"""Names of settings whose values Spark hides."""

_STREAMING: Final = "org.apache.spark.sql.execution.streaming"
_CHECKPOINTING_PACKAGE: Final = (4, 1)
"""Spark moved the checkpoint classes to a package of their own in this version."""

ARROW_OPTIONS: Final = "-Darrow.enable_unsafe_memory_access=true"
"""For Java: batches come from Arrow itself, so their bounds are not checked again at each value of each row. A tenth of
what a read costs."""

_FROZEN_AT: Final = (1, 2, 5, 20)
_calls = 0


def hot() -> None:
    """Call it first in ``read``, ``write``, ``commit`` and what plans: what is loaded by then is garbage to nobody.

    Spark's Python workers collect garbage after every task, 35 ms with pandas and pyarrow loaded; frozen objects are
    not looked at. The first calls do it, for what is imported late. Spark also puts the archive of its own classes
    first on the path of Python: who looks for the version of a package, as psycopg does, reads its 13 000 names, for a
    tenth of a second. The first call puts it last.

    Before each task Spark 3.5 to 4.1 invalidates the import caches, and Python then reads the directory of each
    archive again, once per importer. Importers that a later import needs are created again, without reading anything.
    """
    global _calls
    _calls += 1
    if _calls == 1:
        sys.path[:] = sorted(sys.path, key=lambda entry: entry.endswith(".jar"))
    for entry, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimporter):
            del sys.path_importer_cache[entry]
    if _calls in _FROZEN_AT:
        gc.collect()
        gc.freeze()


def tuned(
    builder: Any,
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    archive: bool = True,
    java_options: str = "",
) -> SparkSession.Builder:
    """*builder* with the settings; what was set before and what is set after stays as it is told.

    Also sets ``PYSPARK_PYTHON`` and, for a ``local`` master, ``SPARK_HOME``, where the environment does not have them.

    :param checkpoints: where the queries of this session keep theirs. Settings that only suit a local disk are made
        when it is on one, and left out when this is not given.
    :param archive: use the archive of Spark's classes, if there is one (:func:`prepare`).
    :param java_options: for a Java that this session starts on this machine, beside ours.
    :raises JavaMissing: Spark needs Java.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = dict(FAST)
    if checkpoints is not None and is_local(checkpoints):
        settings |= _local_checkpoints()
    told: Mapping[str, Any] = builder._options
    if _starts_java(told):
        settings |= _start_settings(str(told.get("spark.master", "local")), archive, java_options)
    for name, value in settings.items():
        if name not in told:
            builder = builder.config(name, value)
    return builder  # type: ignore[no-any-return]


def session(
    master: str = "local[*]",
    *,
    app_name: str = "headwater",
    checkpoints: str | os.PathLike[str] | None = None,
    config: Mapping[str, str] | None = None,
    java_options: str = "",
) -> SparkSession:
    """The session of this process, with the settings of :func:`tuned`; made when there is none.

    :param config: settings over ours. :param java_options: see :func:`tuned`.
    :raises JavaMissing: Spark needs Java.
    :raises SparkMissing: PySpark is not installed. :raises UnsupportedSpark: its version is not supported.
    """
    builder = _builder(master, app_name, checkpoints, config, java_options)
    _start_java(builder._options)
    created: SparkSession = builder.getOrCreate()
    _register(created)
    return created


def _register(spark: SparkSession) -> None:
    """Register the format ``headwater``. Spark finds it by itself, in a lookup of all formats of Python packages; but a
    session has none of them if that lookup fails once: a package is broken, or the machine is too busy.
    """
    version = minor_version(installed_spark())
    if version is not None and version >= (4, 0):
        from pyspark_headwater import DefaultSource  # what that lookup finds; PySpark before 4.0 cannot import it

        spark.dataSource.register(DefaultSource)


def context(
    master: str = "local[*]",
    *,
    app_name: str = "headwater",
    checkpoints: str | os.PathLike[str] | None = None,
    config: Mapping[str, str] | None = None,
    java_options: str = "",
) -> SparkContext:
    """As :func:`session`, without a session: it takes a second, and plain jobs do not need one.

    :raises JavaMissing: Spark needs Java.
    """
    from pyspark import SparkConf, SparkContext

    settings = _builder(master, app_name, checkpoints, config, java_options)._options
    _start_java(settings)
    conf = SparkConf()  # of the Java that runs
    for name, value in settings.items():
        conf.set(name, str(value))
    return SparkContext.getOrCreate(conf)


def launch(
    master: str = "local[*]",
    *,
    app_name: str = "headwater",
    checkpoints: str | os.PathLike[str] | None = None,
    config: Mapping[str, str] | None = None,
    java_options: str = "",
) -> None:
    """Start the Java for :func:`session` or :func:`context` with the same parameters, and wait until it runs.

    Call it in another thread to do something else meanwhile: both functions wait for this Java.

    :raises JavaMissing: Spark needs Java.
    """
    _start_java(_builder(master, app_name, checkpoints, config, java_options)._options)


def _builder(
    master: str,
    app_name: str,
    checkpoints: str | os.PathLike[str] | None,
    config: Mapping[str, str] | None,
    java_options: str,
) -> Any:
    check_spark()
    import pyspark  # noqa: F401 - before a module of it: another thread may import both, in this order
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder().master(master).appName(app_name)
    for name, value in (config or {}).items():
        builder = builder.config(name, value)
    return tuned(builder, checkpoints=checkpoints, java_options=java_options)


def _start_java(settings: Mapping[str, Any]) -> None:
    """Start Java without the settings that are secret: those that it starts with are on its command line."""
    from pyspark import SparkConf, SparkContext

    if _starts_java(settings):
        shown = [(name, str(value)) for name, value in settings.items() if not _SECRET.search(name)]
        starting: Any = SparkContext
        starting._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(shown))


def prepare() -> bool:
    """Create the archive of Spark's classes for the next starts; whether there is one now. It takes some 20 s.

    :raises JavaMissing: Spark needs Java.
    """
    from headwater.spark.class_archive import create_archive
    from headwater.spark.java import find_java

    find_java()
    home = _spark_home()
    return home is not None and create_archive(home).wait() == 0


def prepare_in_background() -> subprocess.Popen[bytes] | None:
    """As :func:`prepare`, in a process of low priority that ends with this thread; ``None`` where that is no use.

    :raises JavaMissing: Spark needs Java.
    """
    from headwater.spark.class_archive import can_have_archive, create_archive, find_archive, is_off
    from headwater.spark.java import find_java

    home = _spark_home()
    if is_off() or home is None or not can_have_archive(home) or find_archive(find_java(), home) is not None:
        return None
    return create_archive(home, background=True)


def is_local(location: str | os.PathLike[str]) -> bool:
    """Whether a path is on a file system of this machine, as far as it says."""
    text = os.fspath(location)
    return ("://" not in text and not text.startswith("dbfs:")) or urlsplit(text).scheme == "file"


def _local_checkpoints() -> dict[str, str]:
    """Settings that need a file system whose rename is atomic: half the forks per batch, 30 ms less."""
    version = minor_version(installed_spark())
    package = f"{_STREAMING}.checkpointing" if version and version >= _CHECKPOINTING_PACKAGE else _STREAMING
    return {
        "spark.sql.streaming.checkpointFileManagerClass": f"{package}.FileSystemBasedCheckpointFileManager",
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    }


def _starts_java(told: Mapping[str, Any]) -> bool:
    """Whether this session will start a Java: not beside one that runs, nor by Spark Connect."""
    from pyspark import SparkContext

    connects = any(name in told for name in ("spark.remote", "spark.api.mode")) or "SPARK_REMOTE" in os.environ
    return SparkContext._gateway is None and not connects and "PYSPARK_GATEWAY_PORT" not in os.environ


def _start_settings(master: str, archive: bool, java_options: str) -> dict[str, str]:
    from headwater.spark.class_archive import archive_options
    from headwater.spark.java import find_java

    java = find_java()
    if not master.startswith("local"):
        return {}
    settings = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    home = _spark_home()
    if home is not None:
        os.environ["SPARK_HOME"] = str(home)
    options = archive_options(java, home) if archive and home is not None else ""
    settings["spark.driver.extraJavaOptions"] = " ".join(filter(None, (ARROW_OPTIONS, java_options, options)))
    return settings


def _spark_home() -> Path | None:
    """That of the environment, otherwise ours; ``None`` where pyspark's own is used."""
    from headwater.spark.session import linked_home

    return Path(os.environ["SPARK_HOME"]) if "SPARK_HOME" in os.environ else linked_home()
