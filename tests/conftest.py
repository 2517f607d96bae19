"""Each folder of tests is a marker: ``pytest -m unit`` runs tests/unit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no failure; and CI must give the same answer for the same commit.
settings.register_profile("headwater", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("headwater")

# A Java that lives for a minute spends half of its time on compiling what it never runs again.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")

# A run that is tested creates no archive of Spark's classes: it takes longer than most tests.
os.environ.setdefault("HEADWATER_SPARK_ARCHIVE", "off")

# Partly cached DataFrames wait for this time, in the process that keeps snapshots.
os.environ.setdefault("HEADWATER_FIRST_PART_SECONDS", "5")

# A test says how wide its terminal is; what the suite runs in does not.
os.environ.pop("COLUMNS", None)

_HERE = Path(__file__).parent
_FIRST = ("spark", "crash", "property", "db", "store", "unit")


def pytest_configure() -> None:
    """A suite that was started in the background ignores Ctrl-C, and so would the commands that it tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files with long tests come first: processes that run files side by side end at about the same time.
    items.sort(key=lambda item: _FIRST.index(item.path.relative_to(_HERE).parts[0]))
    for item in items:
        folder = item.path.relative_to(_HERE).parts[0]
        item.add_marker(folder)
        if item.get_closest_marker("soak") and not os.environ.get("HEADWATER_SOAK"):
            item.add_marker(pytest.mark.skip(reason="takes long: make soak"))
