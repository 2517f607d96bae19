"""A lake in an object store, over HTTP against moto's S3 server: a mock, because no S3 server is here.

It shows our paths, staging and that of two commits one is refused; not S3's latencies and partial failures.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.servers.losing_proxy import losing_proxy
from tests.servers.s3 import s3_server

from headwater.databases.secret_files import SecretUnreadable
from headwater.sinks import iceberg_snapshot, storage
from headwater.sinks.errors import SinkLoginRefused, SinkUnreachable, StagedLost
from headwater.sinks.sink import Committed, Mode
from headwater.spark.failure import Failure, Remedy

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order
from .lakes import LAKES, At, DeltaLake, IcebergLake, Lake, SinkOfLake


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with s3_server() as started:
        yield started


@pytest.fixture(params=LAKES, ids=[one.name for one in LAKES])
def lake(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Lake:
    kind: type[Lake] = request.param
    return kind.in_bucket(url, tmp_path.name, tmp_path)


@pytest.fixture
def iceberg(url: str, tmp_path: Path) -> IcebergLake:
    return IcebergLake.in_bucket(url, tmp_path.name, tmp_path)


def as_in_a_task(sink: SinkOfLake) -> SinkOfLake:
    sent: SinkOfLake = pickle.loads(pickle.dumps(sink))
    return sent


def staged_files(sink: SinkOfLake) -> list[str]:
    return [info.path for info in sink._root.list() if info.path.endswith(".arrow")]


def test_an_object_that_is_not_as_it_was_staged_is_not_committed(lake: Lake) -> None:
    sink, feed = lake.sink(), Feed(lake.sink())
    token = feed.token(2, 1)
    changes = feed.stage_changes(token, [(INSERT, order(key, "x" * 200)) for key in range(100, 3000)])
    staged = [changes, feed.stage_history(token, [order(key) for key in range(9000, 9010)])]
    for end in (".arrow", ".parquet"):
        (name,) = [info.path for info in sink._root.list() if info.path.endswith(end)]
        with sink._root.files.open_input_file(name) as file:
            data = file.read()
        sink._root._upload(name, data[:99])
        with pytest.raises(StagedLost, match=f"has 99 of the {len(data):,} bytes"):
            sink.commit(ORDERS, token, staged)
        sink._root.remove(name)
        with pytest.raises(StagedLost, match="is missing"):
            sink.commit(ORDERS, token, staged)
        sink._root._upload(name, data)
    assert sink.committed(ORDERS, "q", "b1") == Committed()
    assert sink.commit(ORDERS, token, staged)
    assert len(lake.statuses()) == 2900 + 10


def test_a_directory_of_an_earlier_version_in_a_bucket_is_used(url: str, tmp_path: Path) -> None:
    lake = DeltaLake.in_bucket(url, tmp_path.name, tmp_path)
    old, new = replace(ORDERS, name="Orders"), replace(ORDERS, name="Others")
    lake.sink()._root._upload("public.Orders/part-old.parquet", b"")
    for table in (old, new):
        assert Feed(lake.sink(), table).changes(1, (INSERT, order(1)))
    names = {Path(info.path).parts[0] for info in lake.sink()._root.list()}
    assert names == {"public.Orders", "public.others~u1~"}


def test_a_mirror_in_a_bucket(lake: Lake) -> None:
    sink = as_in_a_task(lake.sink())
    assert "secret" not in repr(sink)
    sink.check()
    feed = Feed(sink)
    assert feed.history(1, [order(key) for key in range(4)])
    assert feed.changes(1, (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(9)))
    assert lake.statuses() == {0: "new", 1: "paid", 3: "new", 9: "new"}
    token = feed.token(2)
    many = feed.stage_changes(token, [(INSERT, order(key, "x" * 200)) for key in range(100, 3000)])
    assert staged_files(sink)
    assert sink.commit(ORDERS, token, [many])
    assert not staged_files(sink)
    assert not feed.changes(2, (INSERT, order(5000)))
    assert len(lake.statuses()) == 2904
    assert sink.committed(ORDERS, "q", "b1") == Committed(2, 1, 0)
    assert sum(batch.num_rows for batch in sink.shown(ORDERS, ["id"])) == 2904


@pytest.mark.parametrize("mode", [Mode.CHANGES, Mode.HISTORY], ids=["changes", "history"])
def test_other_modes_in_a_bucket(lake: Lake, mode: Mode) -> None:
    feed = Feed(as_in_a_task(lake.sink(mode)))
    feed.history(1, [order(1)])
    feed.changes(1, (UPDATE, order(1, "paid")))
    assert [row["status"] for row in lake.read().sort_by("_commit_version").to_pylist()] == ["new", "paid"]


def test_of_two_commits_of_one_batch_one_is_refused(lake: Lake, at: At) -> None:
    sink = lake.sink()
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    token = feed.token(2)
    first, second = (feed.stage_changes(token, [(INSERT, order(2))]) for _ in range(2))
    taken: list[bool] = []
    at(lake.before_commit, lambda: taken.append(sink.commit(ORDERS, token, [first])))
    assert not sink.commit(ORDERS, token, [second])
    assert taken == [True]
    assert lake.statuses() == {1: "new", 2: "new"}


def test_what_snapshots_and_attempts_leave_in_a_bucket_is_removed(
    iceberg: IcebergLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg_snapshot, "KEPT_SNAPSHOTS", 1)
    monkeypatch.setattr(iceberg_snapshot, "EXPIRED_SNAPSHOTS", 1)
    sink = iceberg.sink()
    feed = Feed(sink)
    feed.history(1, [order(key) for key in range(4)])
    for epoch in range(1, 6):
        assert feed.changes(epoch, (UPDATE, order(0, f"at {epoch}")))
    assert iceberg.statuses() == {0: "at 5", 1: "new", 2: "new", 3: "new"}
    assert sink.committed(ORDERS, "q", "b1") == Committed(5, 1, 0)
    feed.stage_history(feed.token(0, 2), [order(7000)])
    before = len(sink._root.list("public/orders/data"))
    sink.abort(ORDERS, "q", 1)
    assert len(sink._root.list("public/orders/data")) == before - 1
    assert sum(batch.num_rows for batch in sink.shown(ORDERS, ["id"])) == 4


def test_a_commit_of_delta_whose_answer_is_lost_is_found_and_keeps_its_files(url: str, tmp_path: Path) -> None:
    """The client asks again, and its own commit refuses the second one."""
    with losing_proxy(url) as proxy:
        lake = DeltaLake.in_bucket(proxy.url, tmp_path.name, tmp_path)
        feed = Feed(lake.sink())
        feed.history(1, [order(key) for key in range(4)])
        version = lake.newest()
        proxy.lose(f"{version + 1:020}.json")
        assert feed.changes(1, (UPDATE, order(1, "paid")), (INSERT, order(9)))
        assert proxy.left() == ""
        assert lake.newest() == version + 1
        assert lake.statuses() == {0: "new", 1: "paid", 2: "new", 3: "new", 9: "new"}
        assert feed.changes(2, (INSERT, order(10)))
        assert len(lake.statuses()) == 6


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of delta-rs are tried again for a moment only."""
    monkeypatch.setattr(storage, "BOUNDS", {"timeout": "5s", "retry_timeout": "100ms", "max_retries": "1"})


@pytest.mark.parametrize("status", [0, pytest.param(503, marks=pytest.mark.soak)])
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", [DeltaLake, pytest.param(IcebergLake, marks=pytest.mark.soak)])
def test_an_s3_mock_that_is_away_is_an_error_that_passes(
    kind: type[Lake], url: str, tmp_path: Path, status: int
) -> None:
    with losing_proxy(url) as proxy:
        lake = kind.in_bucket(proxy.url, tmp_path.name, tmp_path)
        sink, feed = lake.sink(), Feed(lake.sink())
        feed.changes(1, (INSERT, order(1)))
        token = feed.token(2)
        staged = feed.stage_changes(token, [(INSERT, order(2))])
        proxy.go_away(status)
        for call in (
            sink.check,
            lambda: sink.committed(ORDERS, "q", "b1"),
            lambda: feed.stage_history(token, [order(2)]),
            lambda: sink.commit(ORDERS, token, [staged]),
            lambda: sink.abort(ORDERS, "q", 1),
            lambda: list(sink.shown(ORDERS, ["id"])),
        ):
            with pytest.raises(SinkUnreachable, match=proxy.url.removeprefix("http://")) as caught:
                call()
            assert Failure.of(caught.value).remedy is Remedy.RETRY
        proxy.come_back()
        assert sink.commit(ORDERS, token, [staged])
    assert kind.in_bucket(url, tmp_path.name, tmp_path).statuses() == {1: "new", 2: "new"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", [DeltaLake, pytest.param(IcebergLake, marks=pytest.mark.soak)])
def test_keys_of_an_s3_mock_that_are_rotated_in_their_file(kind: type[Lake], url: str, tmp_path: Path) -> None:
    """The mock looks at the key alone, not at the signature."""
    file = tmp_path / "key"
    file.write_text("key-1\n")
    names = {DeltaLake: ("storage_options", "AWS_ACCESS_KEY_ID"), IcebergLake: ("catalog_options", "s3.access-key-id")}
    group, name = names[kind]
    with losing_proxy(url) as proxy:
        proxy.take_only("key-1")
        lake = kind.in_bucket(proxy.url, tmp_path.name, tmp_path)
        lake.options = {**lake.options, group: {**lake.options[group], name: f"file:{file}"}}
        feed = Feed(as_in_a_task(lake.sink()))
        assert feed.changes(1, (INSERT, order(1)))
        proxy.take_only("key-2")
        with pytest.raises(SinkLoginRefused, match=proxy.url.removeprefix("http://")) as caught:
            feed.changes(2, (INSERT, order(2)))
        assert Failure.of(caught.value).remedy is Remedy.LOGIN
        assert "key-1" not in str(caught.value)
        file.write_text("key-2\n")
        assert feed.changes(2, (INSERT, order(2)))
        assert feed.changes(3, (INSERT, order(3)))
        file.unlink()
        with pytest.raises(SecretUnreadable, match="No such file"):
            feed.changes(4, (INSERT, order(4)))
    assert kind.in_bucket(url, tmp_path.name, tmp_path).statuses() == {1: "new", 2: "new", 3: "new"}


@pytest.mark.soak
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("origin", ["environment", "profile"])
def test_without_keys_in_its_options_a_lake_takes_those_of_the_machine(
    lake: Lake, url: str, tmp_path: Path, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An S3 mock looks at the key; roles of instances cannot be had here."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if origin == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "machine-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    else:
        keys = tmp_path / "credentials"
        keys.write_text("[lake]\naws_access_key_id = machine-key\naws_secret_access_key = secret\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
        monkeypatch.setenv("AWS_PROFILE", "lake")
    with losing_proxy(url) as proxy:
        proxy.take_only("machine-key")
        there = type(lake).in_bucket(proxy.url, tmp_path.name, tmp_path)
        for group in {"storage_options", "catalog_options"} & set(there.options):
            kept = {name: value for name, value in there.options[group].items() if "key" not in name.lower()}
            # delta-rs looks for profiles beside an endpoint only when it is told to
            there.options = {**there.options, group: {**kept, "AWS_FORCE_CREDENTIAL_LOAD": "true"}}
        assert Feed(there.sink()).changes(1, (INSERT, order(1)))
    assert lake.statuses() == {1: "new"}
