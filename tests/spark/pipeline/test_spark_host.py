"""The Java of a pipeline: it is killed while it starts, or frozen when it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import os, signal, sys, time
from pathlib import Path
from headwater.pipeline import spark_host
from headwater.pipeline.config import configure

source = {"dsn": "postgresql://x", "tables": ["t"]}
config = configure({"source": source, "spark": {"master": "local[1]"}}, folder=Path(sys.argv[1]))
host = spark_host.SparkHost(config)
host.begin()
"""

KILLED = """
def java():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"SparkSubmit" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
            except OSError:
                continue
    return None

while (pid := java()) is None:
    time.sleep(0.02)
from pyspark import SparkContext
while SparkContext._gateway is None:
    time.sleep(0.005)
os.kill(pid, signal.SIGKILL)
try:
    host.session()
except Exception as error:
    print("failed", type(error).__name__)
else:
    print("was faster")
    host.forget()
print(host.session().range(3).count())
host.stop()
"""

FROZEN = """
from pyspark import SparkContext

host.spark()
java = SparkContext._gateway.proc
os.kill(java.pid, signal.SIGSTOP)
spark_host._STOP_SECONDS = 0.5
host.stop()
print(java.returncode, host.session().range(3).count())
host.stop()
"""


def run(script: str, folder: Path) -> str:
    """The last line that it prints."""
    command = [sys.executable, "-c", BEGIN + script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.timeout(300)
def test_a_session_whose_java_is_killed_while_it_starts_is_made_anew(tmp_path: Path) -> None:
    assert run(KILLED, tmp_path) == "3"


@pytest.mark.timeout(300)
def test_a_java_that_is_frozen_is_killed_at_the_end(tmp_path: Path) -> None:
    assert run(FROZEN, tmp_path) == "-9 3"
