"""The Java of Spark: which one it will start, whether it can, and whether it runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwater.spark.errors import JavaMissing

OLDEST: Final = 17
"""The oldest Java that Spark 4 runs on."""

_STEP: Final = "Run: apt-get install openjdk-17-jre-headless. Or set JAVA_HOME to the Java that you have."


@dataclass(frozen=True, slots=True)
class Java:
    """A Java as it is installed.

    :ivar version: the number that people say: 17, 21.
    :ivar build: its whole text, which tells two builds of one version apart.
    """

    command: Path
    version: int
    build: str


def find_java() -> Java:
    """The Java that Spark's scripts take: that of ``JAVA_HOME``, otherwise the first on the path.

    :raises JavaMissing: there is none, it does not run, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if found is None or not Path(found).exists():
        where = f"JAVA_HOME is {home}, which has no bin/java" if home else "there is none on the path"
        raise JavaMissing(f"Spark needs Java {OLDEST} or newer; {where}.", next_step=_STEP)
    command = Path(found).resolve()
    build = _release(command) or _asked(command)
    match = re.search(r'version[" =]+(\d+)', build, re.IGNORECASE)
    version = int(match[1]) if match else 0
    if version < OLDEST:
        raise JavaMissing(f"Spark needs Java {OLDEST} or newer; {command} is {version or 'unknown'}.", next_step=_STEP)
    return Java(command, version, build)


def _release(command: Path) -> str:
    """What the installation says of itself: reading a file takes no time, starting a Java does."""
    try:
        return (command.parent.parent / "release").read_text()
    except OSError:
        return ""


def _asked(command: Path) -> str:
    try:
        return subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError) as error:
        raise JavaMissing(f"{command} does not run: {type(error).__name__}.", next_step=_STEP) from error


# -- the Java that this process started --------------------------------------------------------------------------------


def forget_java() -> None:
    """Its Java has ended: the next session or context starts another one."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway: Any = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
    context: Any = SparkContext
    context._gateway = context._jvm = context._active_spark_context = None
    classes: Any = SparkSession
    classes._instantiatedSession = classes._activeSession = None


def kill_java() -> None:
    """End the Java that this process started, whatever it does."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.kill()
        process.wait()


def java_runs() -> bool:
    """Whether the Java that this process started runs; true where it started none."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    return process is None or process.poll() is None


def java_ended() -> bool:
    """Whether it has ended, or does within a moment: who talks to a process that is killed may know it before."""
    end = time.monotonic() + 1.0
    while java_runs():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
