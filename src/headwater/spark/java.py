"""Which Java Spark will start, and whether it can."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
