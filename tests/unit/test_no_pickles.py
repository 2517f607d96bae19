"""Nothing that is read from a store is unpickled: only what travels between processes of one run is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import headwater

pytestmark = pytest.mark.unit

BETWEEN_PROCESSES = {
    "derive/frames.py",  # rows of a job, which its driver collects
    "spark/jobs.py",  # inputs and results of a job
}


def test_only_what_travels_between_processes_is_pickled() -> None:
    root = Path(headwater.__file__).parent
    uses = re.compile(r"^\s*(?:import|from) (?:pickle|cloudpickle|marshal|shelve|dill|joblib)\b", re.MULTILINE)
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if uses.search(path.read_text())}
    assert found == BETWEEN_PROCESSES
