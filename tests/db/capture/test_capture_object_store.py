"""Capture into an object store that is away, or loses answers: it resumes by itself, without a gap or a duplicate.

The object store is moto's S3 server, a mock, behind a proxy.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.db.capture.captured import SLOT, fill, make_tables
from tests.db.capture.running import RunningCapture
from tests.servers.losing_proxy import LosingProxy, losing_proxy
from tests.servers.postgres import Database
from tests.servers.s3 import s3_server

from headwater.capture import CaptureOptions, CaptureState
from headwater.capture.options import OnRewrite
from headwater.spark.capture_child import CaptureSettings


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[str, LosingProxy]]:
    """An object store, and the proxy before it."""
    with s3_server() as url, losing_proxy(url) as proxy:
        yield url, proxy


@pytest.fixture
def away(bucket: tuple[str, LosingProxy], monkeypatch: pytest.MonkeyPatch) -> Iterator[LosingProxy]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("headwater.state.engines.slate.RETRY_SECONDS", 0.5)
    yield bucket[1]
    bucket[1].come_back()


def at(endpoint: str, folder: Path) -> str:
    return f"slatedb+s3://lake/{folder.name}?endpoint={endpoint}&region=us-east-1"


@pytest.mark.parametrize(
    ("status", "pattern"),
    [
        pytest.param(0, r"/wal/\d+\.sst", id="the seal is cut off"),
        pytest.param(503, ".*", id="everything is answered with 503", marks=pytest.mark.soak),
    ],
)
def test_capture_resumes_after_a_seal_without_an_answer_of_an_s3_mock_server(
    newest_postgres: Database,
    bucket: tuple[str, LosingProxy],
    away: LosingProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    pattern: str,
) -> None:
    make_tables(newest_postgres)
    running = RunningCapture(newest_postgres, tmp_path, ["t"])
    running.store = at(away.url, tmp_path)  # type: ignore[assignment]
    running.start()
    running.store = at(bucket[0], tmp_path)  # type: ignore[assignment]
    fill(newest_postgres, 1, 10)
    running.catch_up()
    with monkeypatch.context() as patch:
        patch.setattr("headwater.state.engines.slate.CALL_SECONDS", 0.5)
        away.go_away(status, pattern)
        fill(newest_postgres, 11, 20)
        running.wait_for(lambda: running.capture.state is CaptureState.WAITING)
        fill(newest_postgres, 21, 30)
    away.come_back()
    running.assert_equal("t")
    running.assert_once("public.t")
    running.stop()


@pytest.mark.soak
def test_capture_waits_for_a_store_that_is_away_at_its_start_on_an_s3_mock_server(
    newest_postgres: Database, bucket: tuple[str, LosingProxy], away: LosingProxy, tmp_path: Path
) -> None:
    make_tables(newest_postgres)
    running = RunningCapture(newest_postgres, tmp_path, ["t"])
    running.store = at(away.url, tmp_path)  # type: ignore[assignment]
    away.go_away()
    running.start()
    running.wait_for(lambda: running.capture.state is CaptureState.WAITING)
    assert "did not answer" in running.capture.statistics.last_error
    away.come_back()
    running.store = at(bucket[0], tmp_path)  # type: ignore[assignment]
    running.wait_for(lambda: running.capture.state is CaptureState.RUNNING)
    away.lose(r"/wal/\d+\.sst")
    fill(newest_postgres, 1, 10)
    running.assert_equal("t")
    running.assert_once("public.t")
    assert away.left() == ""
    running.stop()


_CHILD = """
import sys
from headwater import stopping
from headwater.spark.capture_child import main
stopping.STOP_SECONDS = 1.0
sys.exit(main())
"""


@pytest.mark.soak
def test_a_capture_whose_store_is_away_on_an_s3_mock_server_ends_soon_after_a_signal(
    newest_postgres: Database, bucket: tuple[str, LosingProxy], away: LosingProxy, tmp_path: Path
) -> None:
    make_tables(newest_postgres)
    settings = CaptureSettings(
        newest_postgres.dsn,
        at(away.url, tmp_path),
        str(tmp_path / "spill"),
        ["public.t"],
        slot=SLOT,
        publication=SLOT,
        options=CaptureOptions(epoch_seconds=0.05, on_rewrite=OnRewrite.STOP),
        parent=os.getpid(),
    )
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(settings.to_json()))
    child.stdin.close()
    child.stdin = None
    try:
        reports = (line for line in map(json.loads, child.stdout) if "state" in line)  # others name a sealed epoch
        facts = next(facts for facts in reports if facts["state"] == "running" and facts["epoch"])
        away.go_away()
        fill(newest_postgres, 1, 10)
        next(now for now in reports if now["rows"] > facts["rows"])
        child.send_signal(signal.SIGTERM)
        _, said = child.communicate(timeout=10)
    finally:
        child.kill()
        child.communicate()
    assert "resumes from the last sealed epoch" in said
    away.come_back()
    running = RunningCapture(newest_postgres, tmp_path, ["t"])
    running.store = at(bucket[0], tmp_path)  # type: ignore[assignment]
    running.start()
    running.assert_equal("t")
    running.assert_once("public.t")
    running.stop()


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_any_faults_of_an_s3_mock_server_lose_and_double_nothing(
    newest_postgres: Database,
    bucket: tuple[str, LosingProxy],
    away: LosingProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Lost answers and outages of a few seconds, of all objects or of one kind, under load."""
    monkeypatch.setattr("headwater.state.engines.slate.RETRY_SECONDS", 1.0)
    monkeypatch.setattr("headwater.state.engines.slate.CALL_SECONDS", 3.0)
    chance, ended = random.Random(seed), threading.Event()
    make_tables(newest_postgres)
    running = RunningCapture(newest_postgres, tmp_path, ["t"])
    running.store = at(away.url, tmp_path)  # type: ignore[assignment]
    running.start()
    running.store = at(bucket[0], tmp_path)  # type: ignore[assignment]

    def write() -> None:
        for number in itertools.count(1):
            length = 200 if number % 3 == 0 else 1  # small values are in the keys of the store, large ones beside it
            newest_postgres.execute(
                f"INSERT INTO t SELECT {number} * 100 + i, repeat(md5(i::text), {length}) FROM generate_series(1, 20) i"
            )
            newest_postgres.execute(
                f"UPDATE t SET v = v || 'x' WHERE id % 7 = {number % 7} AND id > {number} * 100 - 500"
            )
            if ended.wait(0.05):
                return

    writer = threading.Thread(target=write)
    writer.start()
    end = time.monotonic() + 45
    while time.monotonic() < end and running.failure is None:
        pattern = chance.choice((".*", r"/wal/.*", r"/values/.*", r"/owner/.*", r"/manifest/.*", r"/compacted/.*"))
        status = chance.choice((0, 500, 503, 504))
        if chance.random() < 0.5:
            away.lose(pattern, status)
            ended.wait(chance.random())
        else:
            away.go_away(status, pattern)
            ended.wait(chance.random() * 6)
            away.come_back()
            ended.wait(chance.random() * 4)
    ended.set()
    writer.join()
    running.assert_equal("t")
    running.assert_once("public.t")
    running.stop()
