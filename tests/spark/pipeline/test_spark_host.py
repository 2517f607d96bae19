"""The session of a pipeline: its Java is killed while it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from headwater.pipeline.config import configure
from headwater.pipeline.spark_host import SparkHost

source = {"dsn": "postgresql://x", "tables": ["t"]}
config = configure({"source": source, "spark": {"master": "local[1]"}}, folder=Path(sys.argv[1]))
host = SparkHost(config)
host.begin()

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


@pytest.mark.timeout(300)
def test_a_session_whose_java_is_killed_while_it_starts_is_made_anew(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "3", done.stdout
