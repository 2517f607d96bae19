"""Run ``headwater demo``, with its kill, on several versions of PySpark, and print a table.

    make spark-versions                            # the newest 3.5, 4.0 and 4.1, and the newest of all
    make spark-versions SPARK_VERSIONS="3.5.7"     # these

Each version has a virtual environment in ``.cache/spark-<version>``, which the next run uses again. All of them get the
same wheel of Headwater, built once. The first run downloads 300 to 450 MB per version.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CACHE: Final = ROOT / ".cache"
SERIES: Final = ("3.5.", "4.0.", "4.1.", "")
"""The newest version of each is taken; the last one is any."""
EXTRAS: Final = "spark,postgres,delta,demo"
DEMO: Final = ("demo", "--rows", "100000", "--seconds", "8", "--json")
SECONDS: Final = 900.0
_OURS: Final = re.compile("(pyspark|py4j)==")
"""Constraints that belong to the version of PySpark that development uses."""
_LEAD_ASTRAY: Final = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Outcome:
    """What came of one version. :ivar problem: empty if the demo passed."""

    version: str
    seconds: float
    problem: str


def main() -> int:
    versions = os.environ.get("SPARK_VERSIONS", "").split() or newest_versions()
    CACHE.mkdir(exist_ok=True)
    wheel = build_wheel()
    outcomes = [try_version(version, wheel) for version in versions]
    print(f"{'PySpark':<10} {'demo, s':>8}  result")
    for outcome in outcomes:
        print(f"{outcome.version:<10} {outcome.seconds:>8.0f}  {outcome.problem or 'passed'}")
    return 1 if any(outcome.problem for outcome in outcomes) else 0


def newest_versions() -> list[str]:
    """The newest version of each series that the package index has."""
    listed = run([sys.executable, "-m", "pip", "index", "versions", "pyspark"])
    match = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    assert match is not None, listed
    known = match[1].split(", ")  # newest first
    return [next(version for version in known if version.startswith(series)) for series in SERIES]


def build_wheel() -> Path:
    """Headwater as one wheel: its C extensions are compiled once."""
    folder = CACHE / "wheel"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def try_version(version: str, wheel: Path) -> Outcome:
    """Install one version beside the wheel, and run the demo."""
    print(f"PySpark {version} …", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        binaries = install(version, wheel)
        began = time.monotonic()
        summary = json.loads(run([str(binaries / "headwater"), *DEMO]).splitlines()[-1])
        problem = "" if summary["kills"] else "the capture was not killed"
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        problem = f"exit code {error.returncode}: {' '.join(lines[-3:])}"
    except subprocess.TimeoutExpired:
        problem = f"took more than {SECONDS:.0f} s"
    return Outcome(version, time.monotonic() - began, problem)


def install(version: str, wheel: Path) -> Path:
    """Create or update the virtual environment of *version*; its folder of commands."""
    home = CACHE / f"spark-{version}"
    binaries = home / "bin"
    if not (binaries / "pip").exists():
        run([sys.executable, "-m", "venv", "--clear", str(home)])
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints = home / "constraints.txt"
    constraints.write_text("".join(line for line in lines if not _OURS.match(line)))
    pip = [str(binaries / "pip"), "install", "--quiet"]
    run([*pip, "--constraint", str(constraints), f"pyspark=={version}", f"headwater[{EXTRAS}] @ {wheel.as_uri()}"])
    run([*pip, "--force-reinstall", "--no-deps", str(wheel)])  # the version of Headwater may be the same as before
    return binaries


def run(command: list[str]) -> str:
    """What it prints. :raises CalledProcessError: it failed; its messages are in the error."""
    environment = {name: value for name, value in os.environ.items() if name not in _LEAD_ASTRAY}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    try:
        output, messages = process.communicate(timeout=SECONDS)
    except BaseException:
        process.terminate()  # the demo then ends all that it has started
        process.communicate()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, messages)
    return output


if __name__ == "__main__":
    sys.exit(main())
