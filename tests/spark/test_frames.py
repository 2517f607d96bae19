"""DataFrames of Spark that are used again: a moment for each action, one for all that an action reads."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import secrets
import select
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from tests.servers.postgres import Database
from tests.spark.driven import read_all, source_of

from headwater.sources.errors import SnapshotExpired
from headwater.spark import action_snapshots, snapshot_keeper
from headwater.spark.action_snapshots import ActionSnapshots, serve_next
from headwater.spark.errors import SparkError
from headwater.spark.snapshot_keeper import KeptFrame

ROWS, PARTS = 1000, 10


@pytest.fixture
def table(newest_postgres: Database) -> Database:
    """Ten parts; all its rows always have the same value."""
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        f"INSERT INTO t SELECT n, 0 FROM generate_series(1, {ROWS}) n",
    )
    return newest_postgres


def load(spark: Any, database: Database, **options: str) -> Any:
    given = {"source": database.dsn, "table": "t", "splitRows": str(ROWS // PARTS), **options}
    return spark.read.format("headwater").options(**given).load()


def change(database: Database) -> None:
    """A commit that changes every row."""
    database.execute("UPDATE t SET v = v + 1")


def sessions(database: Database) -> int:
    """Those that hold a snapshot."""
    asked = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()"
    return int(database.value(asked))


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def values(rows: list[Any]) -> set[tuple[int, int]]:
    """Each value with the position of its snapshot: one pair, where all rows are of one moment."""
    return {(row["v"], row["_commit_version"]) for row in rows}


def test_each_action_sees_the_rows_of_its_own_moment_and_leaves_no_snapshot(
    spark: Any, table: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = load(spark, table, snapshotSeconds="20")
    assert frame.count() == ROWS
    table.execute(f"INSERT INTO t VALUES ({ROWS + 1}, 0)")
    assert frame.count() == ROWS + 1
    change(table)
    frame.orderBy("id").show(1)
    assert "|  1|  1|" in capsys.readouterr().out
    change(table)
    assert values(frame.collect()).pop()[0] == 2
    wait_until(lambda: sessions(table) == 0)
    change(table)
    assert {row["v"] for row in frame.select("v").distinct().collect()} == {3}


def test_actions_that_read_few_parts_read_them_at_one_moment(spark: Any, table: Database) -> None:
    frame = load(spark, table, snapshotSeconds="10")
    assert frame.rdd.getNumPartitions() > 2
    frame.count()
    actions: list[Callable[[], list[Any]]] = [
        lambda: list(frame.tail(ROWS // 2)),
        lambda: list(frame.take(ROWS // 2)),
        lambda: list(frame.limit(ROWS // 2).collect()),
        lambda: list(frame.toLocalIterator()),
    ]
    for number, act in enumerate(actions, start=1):
        change(table)
        rows = act()
        assert len(rows) in (ROWS // 2, ROWS)
        assert len(values(rows)) == 1
        assert values(rows).pop()[0] == number
    wait_until(lambda: sessions(table) == 0)


def test_all_reads_of_one_action_are_of_one_moment_while_rows_change(spark: Any, table: Database) -> None:
    frame = load(spark, table)
    other = frame.selectExpr("id AS other", "v AS w", "_commit_version AS at")
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.01):
            change(table)

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[set[Any]] = []

    def act() -> None:
        rows = frame.join(other, frame.id == other.other).collect()
        assert len(rows) == ROWS
        seen.append({(row["v"], row["w"], row["_commit_version"], row["at"]) for row in rows})

    try:
        actions = [threading.Thread(target=act) for _ in range(2)]
        for action in actions:
            action.start()
        for action in actions:
            action.join()
        act()
    finally:
        stop.set()
        writer.join()
    assert [len(one) for one in seen] == [1, 1, 1], "rows of one moment in each of them"
    for one in seen:
        v, w, version, at = one.pop()
        assert (v, version) == (w, at)


def test_rows_that_were_cached_in_two_actions_are_of_one_moment(spark: Any, table: Database) -> None:
    frame = load(spark, table).cache()
    try:
        frame.show(1)
        change(table)
        assert len(values(frame.collect())) == 1
        assert frame.count() == ROWS
    finally:
        frame.unpersist()


def test_parts_that_were_not_cached_are_refused_when_the_snapshot_is_gone(spark: Any, table: Database) -> None:
    frame = load(spark, table, snapshotSeconds="1").cache()
    try:
        frame.show(1)
        wait_until(lambda: sessions(table) == 0)
        change(table)
        with pytest.raises(PySparkException, match=r"earlier action stored other parts[\s\S]*Load the table again"):
            frame.collect()
    finally:
        frame.unpersist()


def test_an_empty_table_that_is_filled_later_is_read(spark: Any, table: Database) -> None:
    table.execute("TRUNCATE t")
    frame = load(spark, table)
    assert frame.count() == 0
    table.execute("INSERT INTO t SELECT n, 0 FROM generate_series(-5, 5000) n")
    assert frame.count() == 5006


def test_a_worker_that_is_killed_fails_its_action_and_no_other(spark: Any, table: Database) -> None:
    frame = load(spark, table, snapshotSeconds="60")

    def kill(batches: Iterator[Any]) -> Iterator[Any]:
        next(batches)
        os.kill(os.getpid(), signal.SIGKILL)
        yield from batches

    with pytest.raises(Exception, match="crashed"):
        frame.mapInArrow(kill, frame.schema).collect()
    change(table)
    assert values(frame.collect()).pop()[0] == 1


class Task:
    """Stands for Spark's context of a task."""

    action = "1"

    def __init__(self) -> None:
        self._application = secrets.token_hex(4)

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802 - Spark's name
        return {"spark.sql.execution.id": self.action, "spark.app.id": self._application}.get(name)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Task:
    made = Task()
    monkeypatch.setattr(TaskContext, "get", lambda: made)
    return made


def planned(database: Database, folder: Path, **options: str) -> tuple[Any, Any, Any]:
    source = source_of(database, folder, "t", splitRows=str(ROWS // PARTS), **options)
    reader: Any = source.reader(source.schema())
    return reader, source.schema(), reader.partitions()


def test_a_part_that_is_read_again_after_its_snapshot_was_released_is_refused(
    table: Database, tmp_path: Path, task: Task
) -> None:
    reader, schema, parts = planned(table, tmp_path, snapshotSeconds="10")
    read_all(reader, schema, parts)
    change(table)
    assert values(read_all(reader, schema, parts[3:4])).pop()[0] == 0, "a task that is retried finds its snapshot"
    wait_until(lambda: sessions(table) == 0)
    with pytest.raises(SnapshotExpired, match=r"again, or late.*Run the action again"):
        read_all(reader, schema, parts[3:4])
    task.action = "2"
    with pytest.raises(SnapshotExpired, match=r"part 4 of .*stored other parts.*Load the table again"):
        read_all(reader, schema, parts[3:4])
    task.action = "3"
    assert values(read_all(reader, schema, parts)).pop()[0] == 1


def test_a_snapshot_is_kept_for_as_long_as_a_task_reads_in_it(table: Database, tmp_path: Path, task: Task) -> None:
    reader, schema, parts = planned(table, tmp_path, snapshotSeconds="1")
    reading = reader._rows_of(parts[0])
    next(reading)
    task.action = "2"
    read_all(reader, schema, parts)
    task.action = "1"
    change(table)
    assert values(read_all(reader, schema, parts[1:])).pop()[0] == 0
    reading.close()
    wait_until(lambda: sessions(table) == 0)


def test_a_table_whose_columns_change_between_two_actions_is_refused(
    table: Database, tmp_path: Path, task: Task
) -> None:
    reader, schema, parts = planned(table, tmp_path)
    read_all(reader, schema, parts)
    table.execute("ALTER TABLE t ALTER v TYPE text")
    task.action = "2"
    with pytest.raises(SparkError, match=r"columns .* have changed.*Load the table again"):
        read_all(reader, schema, parts)


def test_a_keeper_that_has_ended_is_named_and_the_next_load_has_another_one(
    table: Database, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder = tempfile.mkdtemp(prefix="headwater-test-")  # a keeper that no other test has
    request.addfinalizer(lambda: shutil.rmtree(folder))
    monkeypatch.setattr(tempfile, "tempdir", folder)
    reader, schema, parts = planned(table, tmp_path)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(snapshot_keeper._address()))
        pid = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: sessions(table) == 0)
    with pytest.raises(SnapshotExpired, match=r"does not answer.*Load the table again"):
        read_all(reader, schema, parts)
    assert len(read_all(*planned(table, tmp_path))) == ROWS


def test_who_has_not_the_key_is_told_nothing(table: Database, tmp_path: Path, task: Task) -> None:
    _, _, parts = planned(table, tmp_path)
    kept = parts[0].frame
    stranger = snapshot_keeper.KeptFrame(kept.frame, kept.machine, kept.port, "guessed")
    with pytest.raises(SnapshotExpired, match="does not answer"), stranger.reading(0):
        pass
    assert sessions(table) == 0


moments = itertools.count(1)
failures: list[Exception] = []
released: list[int] = []
ends: dict[str, Callable[[], object]] = {}


@dataclass(frozen=True)
class Moments:
    """Counts its moments, in this process. Fails with what *failures* holds; *ends* are called when one is released."""

    kind: ClassVar[str] = "counted"

    table: str
    fixed: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"table": self.table, "fixed": self.fixed}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Moments:
        return cls(**fields)

    def open(self) -> tuple[Callable[[], None], dict[str, Any]]:
        if failures:
            raise failures[0]
        number = next(moments)
        return lambda: self._end(number), {"moment": number}

    def _end(self, number: int) -> None:
        ends.get(self.table, bool)()
        released.append(number)


def described(name: str, table: str = "t", *, parts: int = 4, fixed: bool = False, seconds: float = 60) -> Any:
    """A DataFrame, as those who plan describe it to the keeper."""
    moments = {"kind": "counted", "moments": Moments(table, fixed).to_json()}
    return {"frame": name, **moments, "parts": parts, "seconds": seconds}


class Kept:
    """A keeper in this process, and tasks that read at its moments."""

    key = "secret"

    def __init__(self) -> None:
        self.snapshots = ActionSnapshots(self.key)
        self._names = (f"frame {number}" for number in itertools.count())
        self.spark = os.pipe()

    def load(self, table: str = "t", **options: Any) -> KeptFrame:
        name = next(self._names)
        self.snapshots.add(described(name, table, **options), os.dup(self.spark[1]))
        return KeptFrame(name, socket.gethostname(), self.snapshots.port, self.key)

    def answer(self, line: bytes) -> dict[str, Any]:
        """To one who plans."""
        ours, its = socket.socketpair(socket.AF_UNIX)
        with ours, ours.makefile("rb") as answers:
            socket.send_fds(ours, [b"."], [self.spark[1]])
            ours.sendall(line + b"\n")
            snapshot_keeper._answer(self.snapshots, self.key, its)
            return dict(json.loads(answers.readline()))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(action_snapshots, "FIRST_PART_SECONDS", 0.0)
    monkeypatch.setitem(action_snapshots.MOMENTS, "counted", (__name__, "Moments"))
    for changed in (failures, released, ends):
        changed.clear()
    return Kept()


def moment(frame: KeptFrame, part: int) -> int:
    with frame.reading(part) as read:
        return int(read["moment"])


def test_parts_that_one_of_several_actions_stored_are_refused(kept: Kept, task: Task) -> None:
    frame = kept.load()
    stored = moment(frame, 0)
    task.action = "2"
    assert moment(frame, 1) == stored, "of the only action that there was"
    task.action = "3"
    assert moment(frame, 0) != stored
    task.action = "4"
    with pytest.raises(SnapshotExpired, match=r"part 3 of 4.* not the only one.*Load the table again"):
        moment(frame, 2)


def test_parts_that_an_earlier_action_stored_are_refused_beside_a_later_read_of_the_table(
    kept: Kept, task: Task
) -> None:
    cached, fresh = kept.load(), kept.load()
    moment(cached, 0)
    task.action = "2"
    with ExitStack() as reading:
        later = reading.enter_context(fresh.reading(0))["moment"]
        with pytest.raises(SnapshotExpired, match=r"part 2 of 4.* not the only one"):
            moment(cached, 1)
        assert moment(fresh, 1) == later
    wait_until(lambda: kept.snapshots.release(everything=True) and later in released)


def test_a_link_that_cannot_be_served_is_closed_and_the_next_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_snapshots, "_PAUSE_SECONDS", 0.0)

    def fail(*given: object) -> None:
        raise RuntimeError("can't start new thread")

    class Full:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many open files")

    full: Any = Full()
    assert serve_next(full, socket.socket.close) is None

    def greet(link: socket.socket) -> None:
        with link:
            link.sendall(b"served")

    with socket.create_server(("127.0.0.1", 0)) as server:
        with monkeypatch.context() as patched, socket.create_connection(server.getsockname()) as link:
            patched.setattr(threading.Thread, "start", fail)
            assert serve_next(server, socket.socket.close) is None
            assert link.recv(1) == b""
        with socket.create_connection(server.getsockname()) as link:
            assert serve_next(server, greet) is not None
            assert link.recv(6) == b"served"


def test_who_shows_no_key_is_dropped_in_time_and_others_are_served(
    kept: Kept, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(action_snapshots, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(action_snapshots, "_MOST_UNPROVEN", 1)
    served = Kept()
    frame = served.load()
    with socket.create_connection(("127.0.0.1", served.snapshots.port)) as slow:
        assert len(slow.recv(100)) > 1
        end = time.monotonic() + 30
        while not select.select([slow], [], [], 0.01)[0]:  # each byte comes long before the timeout of one read
            slow.sendall(b"x")
            assert time.monotonic() < end
    with socket.create_connection(("127.0.0.1", served.snapshots.port)):
        assert moment(frame, 0)


@pytest.mark.parametrize("line", [b"[]", b"{}", b'"', b'{"proof": "\\u00e9"}', b'{"proof": 1}'])
def test_who_sends_nonsense_is_dropped(kept: Kept, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", kept.snapshots.port)) as link:
        link.recv(100)
        link.sendall(line + b"\n")
        assert link.recv(1) == b""


def test_a_snapshot_that_does_not_close_does_not_hold_up_the_others(kept: Kept, task: Task) -> None:
    closes = threading.Event()
    ends.update(hangs=closes.wait, fails=lambda: 1 // 0)
    for table in ends:
        moment(kept.load(table, seconds=0), 0)
    good = moment(kept.load("good", seconds=0), 0)
    wait_until(lambda: kept.snapshots.release() and released == [good])
    closes.set()
    wait_until(lambda: len(released) == 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "KeyError"),
        ({"kind": "os.system", "moments": {}}, "KeyError.*os.system"),
        (described("f", fixed=True), "Epoch 1 is folded"),
    ],
)
def test_any_error_of_a_load_is_answered(kept: Kept, fields: dict[str, Any], message: str) -> None:
    failures.append(SparkError("Epoch 1 is folded."))
    assert re.search(message, kept.answer(json.dumps(fields).encode())["error"])
    os.close(kept.spark[1])
    assert select.select([kept.spark[0]], [], [], 0)[0], "the keeper has closed its end"
    kept.spark = os.pipe()
    assert kept.answer(json.dumps(described("g")).encode())["port"] == kept.snapshots.port


def test_a_keeper_that_is_stuck_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_keeper, "START_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.bind(str(tmp_path / "s"))
        stuck.listen()
        with pytest.raises(SparkError, match=r"did not answer at .* within 0.1 s"):
            snapshot_keeper._asked(tmp_path / "s", b"\n")


def test_a_snapshot_that_cannot_be_taken_fails_the_tasks_that_wait_and_is_tried_again(kept: Kept, task: Task) -> None:
    frame = kept.load()
    failures.append(ImportError("no driver"))
    with pytest.raises(SparkError, match="ImportError: no driver"):
        moment(frame, 0)
    failures.clear()
    waited = action_snapshots._Action()
    waited.failure = math.inf, SparkError("It is locked.")
    with pytest.raises(SparkError, match="locked"):
        action_snapshots._opened(waited, kept.snapshots._frames[frame.frame])
    assert moment(frame, 0)


def test_a_machine_that_vanishes_is_noticed_after_a_minute() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
        action_snapshots.notice_vanished(link)
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [link.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30, 10, 3]


def test_a_long_temporary_directory_is_not_used_for_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 25)))
    path = snapshot_keeper._address()
    assert path.parent == Path("/tmp") / f"headwater-{os.getuid()}"
    assert snapshot_keeper._asked(path.with_name("none"), b"\n") is None
