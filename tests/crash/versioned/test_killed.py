"""Kill -9 at every durable step of a kept table: runs, manifests, merges, pins, what is forgotten."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
from tests.crash.versioned.folding import kept_by_a_process

STEPS = (
    "versioned.before_run",
    "versioned.after_run",
    "versioned.before_manifest",
    "versioned.after_manifest",
    "versioned.before_merge",
    "versioned.after_merge",
    "versioned.before_forget",
    "versioned.after_forget",
    "versioned.before_pin",
    "versioned.after_pin",
    "versioned.before_release",
    "versioned.after_release",
    "versioned.before_folding",
    "versioned.after_folding",
)
SEED = int(os.environ.get("HEADWATER_SEED") or random.SystemRandom().randrange(1 << 32))


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.crash.versioned.folding"])


def keep(folder: Path, generation: int, armed: str = "") -> int | None:
    """How a process ended that kept the table."""
    process = PROCESSES.Process(target=kept_by_a_process, args=(folder, generation, armed))
    process.start()
    process.join(120)
    return process.exitcode


@pytest.fixture(scope="module")
def hits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often each step is passed without a kill."""
    folder = tmp_path_factory.mktemp("clean")
    assert keep(folder, 1) == 0
    found: dict[str, int] = json.loads((folder / "hits.json").read_text())
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_table_goes_on_after_a_kill_at_any_step(step: str, hits: dict[str, int], tmp_path: Path) -> None:
    """Killed once, then a second time in the process that goes on, at the same step."""
    at = random.Random(f"{SEED}{step}").randint(1, hits[step])
    print(f"HEADWATER_SEED={SEED}: {step}@{at}")
    assert keep(tmp_path, 1, f"{step}=kill@{at}") == -signal.SIGKILL
    assert keep(tmp_path, 2, f"{step}=kill") in (0, -signal.SIGKILL)
    assert keep(tmp_path, 3) == 0
