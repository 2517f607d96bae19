"""Spark's classes as an archive that Java maps instead of parsing them: a session starts in about half the time.

An archive belongs to one build of Java and one class path; its name has a hash of both, so another one is never used.
It is some 170 MB in the cache directory and can be deleted at any time.

This module is also the process that creates one: ``python -m headwater.spark.class_archive``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from headwater.spark.directories import cache_directory
from headwater.spark.java import Java, find_java
from headwater.system.child import die_with_parent
from headwater.system.files import make_private, open_private, sync

OFF: Final = "HEADWATER_SPARK_ARCHIVE"
"""Set to ``off`` in the environment, no archive is used or created."""

_QUIET: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off"
_USE: Final = f"-Xshare:auto -XX:+IgnoreUnrecognizedVMOptions -XX:+VerifySharedSpaces {_QUIET}"
"""Java ignores an archive that does not fit. It verifies checksums, which takes no measurable time: otherwise damaged
bytes could end it."""
_SECONDS: Final = 600
"""A process that has not created the archive in this time ends."""
_LOCK_FILE: Final = "spark-classes.lock"
_NEW_FILE: Final = ".spark-classes.new"
_UNUSED_SECONDS: Final = 30 * 86400
"""An archive that no session has used for this time is removed when another one is created."""
_IN_BACKGROUND: Final = "--background"


def find_archive(java: Java, home: Path) -> Path | None:
    """The archive for this Java and the Spark at *home*. One that is too short or too long is none.

    Java ends with a signal on a file that is cut off, so the size is part of the name.
    """
    try:
        for path in cache_directory().glob(f"{_stem(java, home)}-*.jsa"):
            if path.stem.rpartition("-")[2] == str(path.stat().st_size):
                return path
    except OSError:
        pass
    return None


def _stem(java: Java, home: Path) -> str:
    jars = (home / "jars").resolve()
    key = f"{java.command}\n{java.build}\n{home}\n{jars}\n{jars.stat().st_mtime_ns}"
    return f"spark-classes-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def can_have_archive(home: Path) -> bool:
    """Java creates no archive when a directory of its class path has files, as that of Spark's settings can have."""
    settings = Path(os.environ.get("SPARK_CONF_DIR") or home / "conf")
    return not settings.is_dir() or not any(settings.iterdir())


def is_off() -> bool:
    return os.environ.get(OFF, "").lower() == "off"


def archive_options(java: Java, home: Path) -> str:
    """The options for Java that use the archive; none without an archive."""
    path = None if is_off() else find_archive(java, home)
    if path is None:
        return ""
    with suppress(OSError):
        path.touch()
    return f"-XX:SharedArchiveFile={path} {_USE}"


def create_archive(home: Path, *, background: bool = False) -> subprocess.Popen[bytes]:
    """Start the process that creates the archive for the Spark at *home*, unless it exists. It runs a Spark, some 20 s.

    The process ends with the thread that calls this, and has its own process group. Its exit code is 0 when there is an
    archive in the end.

    :param background: run with the lowest priority.
    """
    arguments = [_IN_BACKGROUND] if background else []
    return subprocess.Popen(
        [sys.executable, "-m", "headwater.spark.class_archive", *arguments],
        env=os.environ | {"SPARK_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _create(java: Java, home: Path) -> bool:
    """Create the archive, unless it exists or another process creates it. Unused ones are removed."""
    folder = cache_directory()
    make_private(folder)
    with open_private(folder / _LOCK_FILE, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if find_archive(java, home) is None:
            new = folder / _NEW_FILE
            new.unlink(missing_ok=True)  # of a process that was killed
            _dump_classes(new)
            sync(new)
            stem = _stem(java, home)
            for other in folder.glob("spark-classes-*.jsa"):
                if other.name.startswith(stem) or other.stat().st_mtime < time.time() - _UNUSED_SECONDS:
                    other.unlink()
            new.replace(folder / f"{stem}-{new.stat().st_size}.jsa")
    return True


def _dump_classes(archive: Path) -> None:
    """Run a Spark that writes its classes to *archive* when it ends."""
    from pyspark.sql import SparkSession

    from headwater.spark.session import tuned

    def same(batches: Iterable[Any]) -> Iterable[Any]:
        return batches

    options = f"-XX:ArchiveClassesAtExit={archive} {_QUIET} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    builder = tuned(SparkSession.Builder().master("local[1]"), archive=False)
    builder = builder.config("spark.driver.extraJavaOptions", options).config("spark.log.level", "OFF")
    spark: Any = builder.config("spark.scheduler.mode", "FAIR").getOrCreate()
    spark.sparkContext.parallelize([1], 1).mapPartitions(same).collect()
    spark.range(100).mapInArrow(same, "id bigint").groupBy("id").count().collect()
    stream = spark.readStream.format("rate").load().writeStream.format("noop")
    stream.trigger(availableNow=True).start().awaitTermination()
    java = spark.sparkContext._gateway.proc
    spark.stop()
    java.stdin.close()  # it ends, and writes the archive
    java.wait()


def main() -> int:
    """The process."""
    die_with_parent()
    signal.alarm(_SECONDS)
    if _IN_BACKGROUND in sys.argv:
        os.nice(19)
        with suppress(OSError):  # if memory is short, this process is ended and not the pipeline
            Path("/proc/self/oom_score_adj").write_text("1000")
    return 0 if _create(find_java(), Path(os.environ["SPARK_HOME"])) else 1


if __name__ == "__main__":
    sys.exit(main())
