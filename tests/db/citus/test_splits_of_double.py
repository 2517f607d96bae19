"""Shards that are split, over a double of a Citus cluster: plain Postgres, not Citus.

A node of a real cluster tells what it reads of a shard after the split under the shard's own name, thus not at all;
the double writes such changes to the shard when it is detached.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.db.citus.running import running
from tests.db.citus.writing import fill
from tests.servers.citus_double import CitusDouble

from headwater.capture.renewal import renew
from headwater.sources.citus import shard_numbers

COLUMNS = "id bigint, v text, amount numeric(12,2)"
WHY = "A shard was split, or a tenant isolated, before all of its changes were read: some may be missing."


def first_shard(double: CitusDouble, group: int = 1) -> int:
    return next(shard for shard, owner in double.tables["acc"].shards.items() if owner == group)


def test_a_shard_that_is_split_while_the_capture_follows_loses_and_doubles_nothing(
    double: CitusDouble, tmp_path: Path
) -> None:
    double.distribute("acc", COLUMNS)
    with running(double, tmp_path, "acc") as capture:
        fill(double, "acc", 40)
        capture.assert_equal("acc")
        offset = capture.offset()
        assert offset is not None
        assert offset.shards == {"public.acc": frozenset(double.tables["acc"].shards)}
        double.split("acc", first_shard(double))
        fill(double, "acc", 40, first=40)
        for group in (1, 2):
            double.execute(group, "UPDATE acc SET amount = amount + 1")
        capture.assert_equal("acc")
        capture.assert_once("public.acc")
        offset = capture.offset()
        assert offset is not None
        assert offset.shards == {"public.acc": frozenset(double.tables["acc"].shards)}


def test_a_shard_that_is_split_while_the_capture_is_away_stops_its_table_alone_with_the_command(
    double: CitusDouble, tmp_path: Path
) -> None:
    double.distribute("acc", COLUMNS)
    double.distribute("other", COLUMNS)
    with running(double, tmp_path, "acc", "other") as capture:
        fill(double, "acc", 20)
        capture.assert_equal("acc")
    shard = first_shard(double)
    double.split("acc", shard, f"UPDATE acc_{shard} SET v = 'told by nobody'")
    for _ in range(2):
        with running(double, tmp_path) as capture:
            reason = capture.wait_until_stopped("public.acc")
            assert reason == f"{WHY} Run: headwater resnapshot public.acc"
            fill(double, "other", 5)
            capture.assert_equal("other")
            double.execute(1, "DELETE FROM other")
            double.execute(2, "DELETE FROM other")
    with running(double, tmp_path) as capture:
        assert not renew(capture.store, ["acc"])
        for group in (1, 2):
            double.execute(group, "UPDATE acc SET amount = amount + 1")
        capture.assert_equal("acc")  # and it does not stop for the same split again


def test_a_shard_that_is_split_while_a_node_is_behind_stops_its_table(
    double: CitusDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_numbers, "SPLIT_SECONDS", 1.0)
    double.distribute("acc", COLUMNS)
    with running(double, tmp_path, "acc") as capture:
        fill(double, "acc", 20)
        capture.assert_equal("acc")
        sender = double.execute(1, "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'headwater'")[0][0]
        os.kill(sender, signal.SIGSTOP)
        try:
            shard = first_shard(double)
            double.execute(1, f"UPDATE acc SET v = 'read late' WHERE tableoid = 'acc_{shard}'::regclass")
            double.split("acc", shard, f"UPDATE acc_{shard} SET v = 'told by nobody'")
            assert capture.wait_until_stopped("public.acc").startswith(WHY)
        finally:
            os.kill(sender, signal.SIGCONT)


@pytest.mark.soak
def test_the_shards_of_a_table_that_is_added_later_are_noted(double: CitusDouble, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    double.distribute("late", COLUMNS)
    with running(double, tmp_path, "acc"):
        pass
    with running(double, tmp_path, "acc", "late") as capture:
        fill(double, "late", 10)
        capture.assert_equal("late")
        offset = capture.offset()
        assert offset is not None
        assert offset.shards == {f"public.{name}": frozenset(double.tables[name].shards) for name in ("acc", "late")}
        double.split("acc", first_shard(double))
        fill(double, "acc", 10)
        capture.assert_equal("acc", "late")
