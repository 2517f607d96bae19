"""``kill -9`` at every step of a migration and of a compaction, and at random."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.crash.log_store_tools.migrating_writer import rows_of
from tests.logs import epoch
from tests.sampled import share

from headwater import failpoints
from headwater.log_store import LogView, compaction, migration, rewrite, sealer
from headwater.state import open_reader

ROOT = Path(__file__).parents[3]

MIGRATION_STEPS = (
    migration.BEFORE_SWITCH,
    migration.BEFORE_EPOCH,
    migration.AFTER_EPOCH,
    migration.BEFORE_END,
    rewrite.STAGED,
    sealer.BEFORE_SEAL,
    sealer.AFTER_SEAL,
)


def writer(location: Path, log_format: int, epochs: int, tool: str, stage_bytes: int = 1 << 20, kill: str = "") -> int:
    command = [sys.executable, "-m", "tests.crash.log_store_tools.migrating_writer", str(location)]
    command += [str(log_format), str(epochs), tool, str(stage_bytes)]
    environment = {**os.environ, failpoints.VARIABLE: kill}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def check(location: Path) -> tuple[int, set[tuple[int, ...]], int]:
    """Everything that was sealed is there exactly once; returns epochs, formats and raw rows of format 1."""
    with open_reader(str(location)) as store, store.snapshot() as view:
        shown = LogView.open(view, "orders")
        formats = {end.formats.numbers for end in shown.epochs()}
        numbers = [end.epoch.ms for end in shown.epochs()]
        assert numbers == list(range(1, shown.sealed.ms + 1))
        for number in numbers:
            got: list[tuple[int, int, int, str]] = []
            for batch in shown.read_range(epoch(number - 1), epoch(number)):
                columns = ("_seq", "_op", "id", "name")
                got += zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
            assert len(got) == len(rows_of(number)), number
            assert set(got) == rows_of(number)
        raw = sum(1 for _ in view.scan_prefix((0x8000_0000 + shown.log.number).to_bytes(4, "big") + b"\0"))
    return len(numbers), formats, raw


@pytest.mark.parametrize("hit", share([1, 3], 1, 2))
@pytest.mark.parametrize("step", MIGRATION_STEPS)
def test_a_migration_killed_at_any_step_goes_on_where_it_was(tmp_path: Path, step: str, hit: int) -> None:
    location = tmp_path / "store"
    assert writer(location, 1, 5, "none") == 0
    stage_bytes = 1000 if step == rewrite.STAGED else 1 << 20
    once = step in (migration.BEFORE_SWITCH, migration.BEFORE_END)
    killed = writer(location, 1, 8, "migrate", stage_bytes, f"{step}=kill@{1 if once else hit}")
    assert killed == -signal.SIGKILL
    check(location)
    assert writer(location, 1, 12, "migrate") == 0
    _, formats, raw = check(location)
    assert formats == {(2,)}
    assert raw == 0


@pytest.mark.parametrize("step", [compaction.BEFORE_EPOCH, sealer.BEFORE_SEAL, sealer.AFTER_SEAL])
@pytest.mark.parametrize("log_format", share([1, 2], 1, 2))
def test_a_compaction_killed_at_any_step_loses_no_key(tmp_path: Path, log_format: int, step: str) -> None:
    location = tmp_path / "store"
    assert writer(location, log_format, 5, "none") == 0
    writer(location, log_format, 5, "compact", kill=f"{step}=kill@2")
    assert writer(location, log_format, 5, "compact") == 0
    with open_reader(str(location)) as store, store.snapshot() as view:
        shown = LogView.open(view, "orders")
        newest = max(end.epoch.ms for end in shown.epochs())
        expected: dict[int, tuple[int, str]] = {}
        for number in range(1, newest + 1):
            for _, op, key, name in sorted(rows_of(number)):
                expected[key] = (op in (1, 3), name)
        got: dict[int, tuple[int, str]] = {}
        for batch in shown.read_range(0, shown.sealed):
            for op, key, name in zip(*(batch.column(c).to_pylist() for c in ("_op", "id", "name")), strict=True):
                got[key] = (op in (1, 3), name)
    assert got == expected


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_writers_and_a_reader_killed_at_random_while_a_log_is_migrated(tmp_path: Path) -> None:
    location = tmp_path / "store"
    rng = random.Random(20261115)
    assert writer(location, 1, 30, "none") == 0
    deadline = time.monotonic() + 200  # a busy machine is no failure
    rounds = 0
    formats: set[tuple[int, ...]] = {(1,)}
    while formats != {(2,)} and time.monotonic() < deadline:
        command = [sys.executable, "-m", "tests.crash.log_store_tools.migrating_writer", str(location)]
        child = subprocess.Popen([*command, "1", "500", "migrate", "5000"], cwd=ROOT, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.random() * 0.02)
        child.kill()
        child.communicate()
        _, formats, _ = check(location)
        rounds += 1
    assert formats == {(2,)}
    assert rounds > 1


def test_a_consumer_in_another_process_gets_every_epoch_whole_during_a_migration(tmp_path: Path) -> None:
    location = tmp_path / "store"
    assert writer(location, 1, 10, "none") == 0
    command = [sys.executable, "-m", "tests.crash.log_store_tools.migrating_writer", "consume", str(location)]
    consumer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert writer(location, 1, 30, "migrate") == 0
        assert consumer.stdout is not None
        got: dict[int, int] = {}
        while len(got) < 40:
            for part in consumer.stdout.readline().split():
                at, _, count = part.partition(":")
                assert int(at) not in got
                got[int(at)] = int(count)
    finally:
        consumer.kill()
        consumer.communicate()
    assert got == {number: len(rows_of(number)) for number in range(1, 41)}
