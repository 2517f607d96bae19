"""What Headwater keeps for itself is private whatever the umask, and a store that others can write is refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headwater.pipeline.sink_commands import add_sink
from headwater.pipeline.sink_control import DesiredState, SinkControl
from headwater.sinks.dead_letters import DeadLetters
from headwater.sinks.storage import Storage
from headwater.state.location import open_reader, open_writer
from headwater.system.files import UnsafeDirectory, make_private, make_root, open_private, replace_file
from headwater.versioned.pins import locked

pytestmark = pytest.mark.store


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}


def is_private(root: Path) -> bool:
    return all(mode in (0o600, 0o700) for mode in modes(root).values())


def test_parents_are_private_inside_a_private_directory_and_passable_elsewhere(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private(tmp_path / "data/headwater/shop")
    make_private(tmp_path / "data/headwater/shop/spill/1")
    assert modes(tmp_path) == {
        "data": 0o755,
        "data/headwater": 0o755,
        "data/headwater/shop": 0o700,
        "data/headwater/shop/spill": 0o700,
        "data/headwater/shop/spill/1": 0o700,
    }
    with pytest.raises(FileExistsError):
        make_private(Path(__file__))


def test_files_are_private_and_replaced_as_a_whole(tmp_path: Path) -> None:
    with open_private(tmp_path / "log", "ab") as file:
        file.write(b"1")
    replace_file(tmp_path / "facts.json", "1")
    replace_file(tmp_path / "facts.json", "2", durable=True)
    assert modes(tmp_path) == {"log": 0o600, "facts.json": 0o600}
    assert (tmp_path / "facts.json").read_text() == "2"


def test_what_is_ours_is_private(tmp_path: Path) -> None:
    work = tmp_path / "work"
    open_writer(work).close()
    with closing(SinkControl(str(work / "pipelines/shop"))) as control:
        control.set_desired_state("delta", DesiredState.PAUSED)
    Storage(str(work / "staging/console"), is_private=True).within("t").check()
    DeadLetters(str(work / "dead_letters/delta"))._sink.check()
    with locked(work / "tables"):
        pass
    assert is_private(tmp_path), modes(tmp_path)
    assert (work / "dead_letters").is_dir()


def test_a_target_table_keeps_the_umask(tmp_path: Path) -> None:
    with Storage(str(tmp_path / "lake")).create("t/part.parquet") as stream:
        stream.write(b"1")
    assert modes(tmp_path) == {"lake": 0o777, "lake/t": 0o777, "lake/t/part.parquet": 0o666}


def test_a_pipeline_file_with_a_password_stays_private_when_a_sink_is_added(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    with open_private(path) as file:
        file.write('[source]\ndsn = "postgresql://u:secret@db/shop"\ntables = ["t"]\n')
    add_sink(path, "console", {})
    assert modes(tmp_path) == {"pipeline.toml": 0o600}


@pytest.mark.parametrize("location", ["{0}", "slatedb+file://{0}"], ids=["embedded", "slatedb"])
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_a_store_that_others_can_write_is_refused(tmp_path: Path, location: str, mode: int) -> None:
    store = tmp_path / "store"
    with open_writer(location.format(store)):
        pass
    store.chmod(mode)
    for opens in (open_writer, open_reader):
        with pytest.raises(UnsafeDirectory) as refused:
            opens(location.format(store))
        assert f"{mode:04o}" in refused.value.message
        assert refused.value.next_step == f"Run: chmod 700 {store}"
    store.chmod(0o700)
    open_reader(location.format(store)).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(0o700)
    os.chown(tmp_path / "store", 65534, -1)
    with pytest.raises(UnsafeDirectory, match="uid 65534"):
        make_root(tmp_path / "store")
