"""``headwater log`` as a person meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.logs import LogConsumer, epoch
from tests.store.log_store.tools import Table, chunk
from typer.testing import CliRunner

from headwater.cli.main import app
from headwater.log_store import RetentionMiss
from headwater.stream import Op

runner = CliRunner()


def made(tmp_path: Path, log_format: int = 2, epochs: int = 4) -> str:
    table = Table(str(tmp_path / "store"), log_format=log_format)
    for number in range(epochs):
        table.write(chunk([(Op.INSERT, 1, f"secret {number}"), (Op.INSERT, number, "other")]))
    table.close()
    return table.location


@pytest.fixture
def location(tmp_path: Path) -> str:
    return made(tmp_path)


def invoke(*arguments: str) -> str:
    done = runner.invoke(app, ["log", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def lines(*arguments: str) -> list[Any]:
    return [json.loads(line) for line in invoke(*arguments, "--json").splitlines()]


def headwater(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "headwater"), "log", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def consume(location: str, name: str, upto: int) -> None:
    with LogConsumer.open(location, "orders", name) as consumer:
        consumer.commit(epoch(upto))


def test_status_names_the_consumer_that_holds_the_log_back(location: str) -> None:
    assert "No consumers" in invoke("status", location)
    consume(location, "mirror", 4)
    consume(location, "audit", 1)
    shown = invoke("status", location, "orders")
    assert "audit holds the log back" in shown
    assert "mirror" in shown
    ((status,),) = lines("status", location)
    assert (status["held_back_by"], status["epochs"], status["rows"], status["format"]) == ("audit", 4, 8, 2)
    audit, mirror = status["consumers"]
    assert (audit["name"], audit["delivered"], audit["lag_epochs"], audit["lag_rows"]) == ("audit", epoch(1), 3, 6)
    assert audit["lag_bytes"] > 0
    assert audit["lag_seconds"] > 0
    assert (mirror["name"], mirror["lag_epochs"], mirror["lag_seconds"]) == ("mirror", 0, 0)


def test_show_gives_epochs_and_rows_and_values_only_when_asked(location: str) -> None:
    ends = lines("show", location, "orders")
    assert [(end["epoch"], end["rows"], end["formats"]) for end in ends] == [(epoch(n), 2, [2]) for n in range(1, 5)]
    assert len(lines("show", location, "orders", "--limit", "2")) == 2
    rows = lines("show", location, "orders", "--epoch", str(int(epoch(2))))
    assert {row["op"] for row in rows} == {"insert"}
    assert sorted(row["seq"] for row in rows) == [0, 1]
    assert "values" not in rows[0]
    vnode = rows[0]["vnode"]
    assert {row["vnode"] for row in lines("show", location, "orders", "--vnode", str(vnode))} == {vnode}
    for text in (invoke("show", location, "orders"), invoke("show", location, "orders", "--epoch", str(int(epoch(2))))):
        assert "secret" not in text
    assert "secret 1" in invoke("show", location, "orders", "--epoch", str(int(epoch(2))), "--values")
    with_values = lines("show", location, "orders", "--values", "--limit", "100")
    assert {"id": 1, "name": "secret 3"} in [row["values"] for row in with_values]


def test_rewind_of_a_consumer(tmp_path: Path) -> None:
    table = Table(str(tmp_path / "store"))
    for _ in range(4):
        table.write()
    table.close()
    consume(table.location, "mirror", 3)
    consume(table.location, "sink", 4)
    assert "gets again" in invoke("rewind", table.location, "orders", "mirror", "--to-epoch", str(int(epoch(1))))
    invoke("rewind", table.location, "orders", "sink", "--to-epoch", str(int(epoch(2))))
    ((status,),) = lines("status", table.location)
    delivered = {one["name"]: one["delivered"] for one in status["consumers"]}
    assert delivered == {"mirror": epoch(1), "sink": epoch(2)}


def test_drop_of_a_consumer(tmp_path: Path) -> None:
    table = Table(str(tmp_path / "store"))
    table.write()
    table.close()
    consume(table.location, "mirror", 1)
    consume(table.location, "sink", 1)
    asked = runner.invoke(app, ["log", "drop", table.location, "orders", "sink"], input="n\n")
    assert asked.exit_code == 1
    assert len(lines("status", table.location)[0][0]["consumers"]) == 2
    for name in ("sink", "mirror"):
        assert "any more" in invoke("drop", table.location, "orders", name, "--yes")
    assert lines("status", table.location)[0][0]["consumers"] == []
    consume(table.location, "mirror", 1)  # the name is free again
    assert [one["name"] for one in lines("status", table.location)[0][0]["consumers"]] == ["mirror"]


def test_errors_end_with_the_next_command(location: str) -> None:
    consume(location, "mirror", 3)
    table = Table(location)
    owned = headwater("migrate", location, "orders")
    assert owned.returncode == 1
    assert f"Stop that process, then: headwater log migrate {location} orders" in owned.stderr
    table.seal()
    table.seal()  # forgets up to epoch 3
    table.close()
    gone = headwater("rewind", location, "orders", "mirror", "--to-epoch", str(int(epoch(1))))
    assert gone.returncode == 1
    assert f"headwater log rewind {location} orders mirror --to-epoch {int(epoch(3))}" in gone.stderr
    old = headwater("show", location, "orders", "--epoch", str(int(epoch(1))))
    assert f"headwater log show {location} orders" in old.stderr
    for command in (("show", location, "nothing"), ("rewind", location, "orders", "nobody", "--to-epoch", "65536")):
        wrong = headwater(*command)
        assert wrong.returncode == 1
        assert f"headwater log status {location}" in wrong.stderr
        assert "Traceback" not in wrong.stderr
    assert not (Path(location) / "consumers" / "orders" / "nobody").exists()
    assert headwater("rewind", location, "orders", "mirror", "--to-epoch", "7").returncode == 2
    assert headwater("show", location, "orders", "--vnode", "999").returncode == 2
    assert headwater("migrate", location + "x", "orders").returncode == 1
    assert not Path(location + "x").exists()


def test_migrate_and_compact_say_what_they_did(tmp_path: Path) -> None:
    location = made(tmp_path, log_format=1)
    before = lines("show", location, "orders", "--values", "--limit", "100")
    done = lines("migrate", location, "orders", "--at-once", "1", "--compression", "lz4")[0]
    assert (done["epochs"], done["rows"], done["epochs_left"]) == (4, 8, 0)
    assert [end["formats"] for end in lines("show", location, "orders")] == [[2]] * 4
    key = lambda row: (row["epoch"], row["seq"])  # noqa: E731
    assert sorted(lines("show", location, "orders", "--values", "--limit", "100"), key=key) == sorted(before, key=key)
    assert "nothing had to be rewritten" in invoke("migrate", location, "orders")
    assert "8 → 4 rows" in invoke("compact", location, "orders")
    assert lines("compact", location, "orders")[0]["rows"] == 4
    assert "compacted" in invoke("show", location, "orders")


@pytest.fixture
def follower(location: str) -> Iterator[subprocess.Popen[str]]:
    command = [str(Path(sys.executable).parent / "headwater"), "log", "tail", location, "orders", "--json"]
    arguments = [*command, "--after", str(int(epoch(2)))]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    yield child
    child.kill()
    child.communicate()


def test_tail_follows_sealed_epochs_until_ctrl_c(location: str, follower: subprocess.Popen[str]) -> None:
    assert follower.stdout is not None
    assert [json.loads(follower.stdout.readline())["epoch"] for _ in range(2)] == [epoch(3), epoch(4)]
    table = Table(location)
    number = table.write()
    table.close()
    line = json.loads(follower.stdout.readline())
    assert (line["epoch"], line["rows"]) == (epoch(number), 80)
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=20)
    assert follower.returncode == 130


def test_tail_with_a_limit_and_values(location: str) -> None:
    shown = invoke("tail", location, "orders", "--after", "0", "--limit", "2", "--values")
    assert "secret 1" in shown
    assert "secret 2" not in shown
    assert "2 rows" in shown


def test_retain_drops_the_oldest_but_nothing_that_a_consumer_needs(location: str) -> None:
    consume(location, "mirror", 1)
    dry = lines("retain", location, "orders", "--max-bytes", "0", "--dry-run")[0]
    assert (dry["epochs"], dry["rows"], dry["needed_by"], dry["dry_run"]) == (4, 8, ["mirror"], True)
    refused = headwater("retain", location, "orders", "--max-bytes", "0")
    assert refused.returncode == 1
    assert "mirror" in refused.stderr
    assert f"headwater log drop {location} orders" in refused.stderr
    assert len(lines("show", location, "orders")) == 4
    assert lines("retain", location, "orders", "--max-bytes", "1TiB")[0]["epochs"] == 0
    forced = lines("retain", location, "orders", "--max-bytes", "0B", "--force")[0]
    assert (forced["epochs"], forced["needed_by"]) == (3, ["mirror"]), "epoch 1 was delivered"
    assert lines("show", location, "orders") == []
    with LogConsumer.open(location, "orders", "mirror") as mirror, pytest.raises(RetentionMiss):
        mirror.wait(0.0)
    assert "missed" in invoke("status", location)


def test_retain_without_consumers_and_with_the_writer_running(location: str) -> None:
    assert "Would drop 4 epochs" in invoke("retain", location, "orders", "--max-bytes", "1", "--dry-run")
    table = Table(location)
    owned = headwater("retain", location, "orders", "--max-bytes", "1")
    assert owned.returncode == 1
    assert "Stop that process, then: headwater log retain" in owned.stderr
    assert "Would drop" in headwater("retain", location, "orders", "--max-bytes", "1", "--dry-run").stdout
    table.close()
    assert "Dropped 4 epochs" in invoke("retain", location, "orders", "--max-bytes", "1")
    assert lines("show", location, "orders") == []
    for wrong in (("--max-bytes", "1 parsec"), ("--max-age", "-3"), ("--max-age", "soon"), ()):
        assert headwater("retain", location, "orders", *wrong).returncode == 2


def test_a_policy_is_shown_set_and_taken_away(location: str) -> None:
    assert "no policy" in invoke("retention", location, "orders")
    found = lines("retention", location, "orders", "--max-bytes", "1.5GiB", "--max-age", "7d")[0]
    policy = {"max_bytes": 3 << 29, "max_age_seconds": 604_800.0, "force": False}
    assert found == {"log": "orders", "policy": policy} == lines("retention", location, "orders")[0]
    assert "at most 1.5 GiB and 7 d; the rest is dropped, but nothing that a consumer needs" in invoke(
        "retention", location, "orders"
    )
    assert headwater("retention", location, "orders", "--force").returncode == 2
    assert headwater("retention", location, "orders", "--clear", "--max-age", "1d").returncode == 2
    assert headwater("retention", location, "nothing").returncode == 1
    assert lines("retention", location, "orders", "--clear")[0]["policy"] is None


RUNNING = """
import sys
from headwater.log_store import RetentionMiss
from tests.logs import LogConsumer
with LogConsumer.open(sys.argv[1], "orders", "mirror") as consumer:
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_running_consumer_is_neither_rewound_nor_dropped(location: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", RUNNING, location], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for command in (
            ("rewind", location, "orders", "mirror", "--to-epoch", "0"),
            ("drop", location, "orders", "mirror", "-y"),
        ):
            refused = headwater(*command)
            assert refused.returncode == 1
            assert str(child.pid) in refused.stderr, "who it is"
            assert f"Stop that process, then: headwater log {command[0]}" in refused.stderr
    finally:
        child.communicate(timeout=10)
    assert headwater("rewind", location, "orders", "mirror", "--to-epoch", "0").returncode == 0
