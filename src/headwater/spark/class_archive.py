"""Spark's classes as an archive that Java maps instead of parsing them: a session starts in about half the time.

An archive belongs to one build of Java and one class path; its name says which, so another one is never taken. It is
some 170 MB in the cache directory and may be deleted at any time. Java ignores an archive that does not fit.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from headwater.private_files import make_private
from headwater.spark.directories import cache_directory
from headwater.spark.java import Java

OFF: Final = "HEADWATER_SPARK_ARCHIVE"
"""Set to ``off`` in the environment, no archive is used."""

_QUIET: Final = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
_SECONDS: Final = 180.0
_WARM_UP: Final = """
import sys
from pyspark.sql import SparkSession
from headwater.spark.session import tuned
options = "-XX:ArchiveClassesAtExit=" + sys.argv[1] + " -Xlog:cds=off -Xlog:cds+dynamic=off"
builder = tuned(SparkSession.builder.master("local[1]"), archive=False)
spark = builder.config("spark.driver.extraJavaOptions", options).config("spark.log.level", "OFF").getOrCreate()
batches = lambda found: found
spark.range(100).mapInArrow(batches, "id bigint").groupBy("id").count().collect()
spark.readStream.format("rate").load().writeStream.format("noop").trigger(availableNow=True).start().awaitTermination()
process = spark.sparkContext._gateway.proc
spark.stop()
process.stdin.close()
process.wait(120)
"""


def archive_path(java: Java, home: Path) -> Path:
    """Where the archive for this Java and the Spark at *home* is, or would be."""
    jars = (home / "jars").resolve()
    told = f"{java.command}\n{java.build}\n{home}\n{jars}\n{jars.stat().st_mtime_ns}"
    return cache_directory() / f"spark-classes-{hashlib.sha256(told.encode()).hexdigest()[:16]}.jsa"


def archive_options(java: Java, home: Path) -> str:
    """The options for Java that take the archive; none where there is no archive."""
    if os.environ.get(OFF, "").lower() == "off":
        return ""
    try:
        path = archive_path(java, home)
        return f"-XX:SharedArchiveFile={path} {_QUIET}" if path.stat().st_size else ""
    except OSError:
        return ""


def make_archive(java: Java, home: Path) -> bool:
    """Make the archive unless it is there: starts a Spark of its own, which takes some 20 s; whether there is one now.

    Archives of others that no longer fit are removed.
    """
    made: Path | None = None
    try:
        path = archive_path(java, home)
        if path.exists():
            return True
        make_private(path.parent)
        made = path.with_name(f".{path.name}.{os.getpid()}")
        _warm_up(made, home)
        made.replace(path)
        for other in path.parent.glob("spark-classes-*.jsa"):
            if other != path:
                other.unlink(missing_ok=True)
        return True
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        if made is not None:
            made.unlink(missing_ok=True)


def _warm_up(archive: Path, home: Path) -> None:
    """Run a Spark that writes its classes to *archive* when it ends."""
    quiet = subprocess.DEVNULL
    subprocess.run(
        [sys.executable, "-c", _WARM_UP, str(archive)],
        env=os.environ | {"SPARK_HOME": str(home)},
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
        timeout=_SECONDS,
        check=True,
    )
