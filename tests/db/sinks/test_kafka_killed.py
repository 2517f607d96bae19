"""A delivery to Kafka that is killed at any durable step, or wakes up late, leaves each change exactly once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.crash.sinks import deliveries
from tests.db.sinks import kafka_child
from tests.sampled import share
from tests.servers.kafka import KafkaServer

from headwater.failpoints import registered
from headwater.sinks.kafka import KafkaSink
from headwater.sinks.sink import Committed, Mode

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["confluent_kafka.admin", "headwater.sinks.kafka", "tests.db.sinks.kafka_child"])
ROOT = Path(__file__).parents[3]
MODES = ["changes", "mirror"]


def run(*arguments: Any) -> int:
    process = _PROCESSES.Process(target=kafka_child.deliver, args=arguments)
    process.start()
    process.join(90)
    assert process.exitcode is not None
    return process.exitcode


class Place:
    """Topics of one delivery."""

    def __init__(self, kafka: KafkaServer, name: str, mode: str, path: Path) -> None:
        self.kafka, self.mode = kafka, mode
        self.path = path / name
        topic = f"{name}.{mode}.{{namespace}}.{{table}}"
        self.options = {"brokers": kafka.brokers, "topic": topic, "staging": str(self.path), "replication": 1}
        self.sink = KafkaSink(
            brokers=kafka.brokers, topic=topic, staging=str(self.path), replication=1, mode=Mode(mode)
        )

    @property
    def text(self) -> str:
        return json.dumps({**self.options, "mode": self.mode})

    def contents(self) -> Any:
        found = self.kafka.read(self.sink.topic_of(deliveries.WIDER))
        if self.mode == "mirror":
            newest = {key: value for _, key, value in found}
            made = [json.loads(value) for value in newest.values() if value is not None]
            return {row["id"]: (row["status"], row["total"]) for row in made}
        rows = [json.loads(value or b"") for _, _, value in found]
        return sorted((row["_commit_version"], row["id"], row["_change_type"], row["status"] or "") for row in rows)


@pytest.mark.parametrize("mode", MODES)
def test_killed_at_any_step(kafka: KafkaServer, mode: str, tmp_path: Path) -> None:
    clean = Place(kafka, "clean", mode, tmp_path)
    assert run(clean.text, "", 0, str(tmp_path / "hits.json")) == 0
    hits: dict[str, int] = json.loads((tmp_path / "hits.json").read_text())
    assert set(hits) >= {name for name in registered() if name.startswith(("sink.kafka.", "sink.staging."))}
    expected = clean.contents()
    if mode == "mirror":
        assert expected == deliveries.MIRROR
    else:
        assert len(set(expected)) == len(expected) > 3000

    def kill(name: str, at: int) -> None:
        place = Place(kafka, f"{name}-{at}", mode, tmp_path)
        assert run(place.text, f"{name}=kill@{at}") == -signal.SIGKILL, name
        assert run(place.text) == 0, (name, at)
        assert place.contents() == expected, (name, at)
        assert place.sink.committed(deliveries.WIDER, "q", "b1") == Committed(9, 3, 0), (name, at)
        assert not list(place.path.rglob("*.arrow")), (name, at)

    cases = [(name, at) for name, count in hits.items() for at in steps(count, mode)]
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(kill, *case) for case in share(cases, MODES.index(mode), 2 * len(MODES))]:
            done.result()


def steps(count: int, mode: str) -> set[int]:
    return {1, count} if mode == "changes" else {(count + 1) // 2}


@pytest.mark.parametrize(
    ("step", "error"), [("sink.kafka.before_commit", "SinkFenced"), ("sink.kafka.after_begin", "StagedLost")]
)
def test_a_stale_process_that_wakes_up_after_a_takeover_commits_nothing(
    kafka: KafkaServer, step: str, error: str, tmp_path: Path
) -> None:
    place = Place(kafka, step, "changes", tmp_path)
    clean = Place(kafka, f"clean-{step}", "changes", tmp_path)
    command = [sys.executable, "-m", "tests.db.sinks.kafka_child", place.text, step, "3"]
    stale = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(stale.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert run(place.text, "", 2) == 0
        assert run(clean.text, "", 2) == 0
        before = place.contents()
        os.kill(stale.pid, signal.SIGCONT)
        output, _ = stale.communicate(timeout=90)
    finally:
        stale.kill()
        stale.wait()
    assert output.split() == [error]
    assert place.contents() == before == clean.contents()
