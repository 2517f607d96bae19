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

STEPS = ("run", "manifest", "merge", "forget", "pin", "release", "folding")
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
def test_a_table_goes_on_after_kills_before_and_after_any_step(step: str, hits: dict[str, int], tmp_path: Path) -> None:
    """Killed at one side of the step, then at the other in the process that goes on."""
    chance = random.Random(f"{SEED}{step}")
    sides = chance.sample([f"versioned.before_{step}", f"versioned.after_{step}"], 2)
    at = chance.randint(1, hits[sides[0]])
    print(f"HEADWATER_SEED={SEED}: {sides[0]}@{at}, {sides[1]}")
    assert keep(tmp_path, 1, f"{sides[0]}=kill@{at}") == -signal.SIGKILL
    assert keep(tmp_path, 2, f"{sides[1]}=kill") in (0, -signal.SIGKILL)
    assert keep(tmp_path, 3) == 0
