"""Pins: an epoch that somebody needs stays, and one that is folded cannot be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.store.sinks.file_sinks import INSERT, ORDERS, UPDATE, order
from tests.store.versioned.written import WrittenTable, rows_at

from headwater.versioned import BaseGone, NotComplete
from headwater.versioned.pins import may_read
from headwater.versioned.status import kept_status


@pytest.fixture
def kept(tmp_path: Path) -> WrittenTable:
    made = WrittenTable(tmp_path)
    made.history([order(key) for key in range(20)])
    return made


def test_the_base_stops_at_the_lowest_pin(kept: WrittenTable) -> None:
    table = kept.open()
    first = kept.write((UPDATE, order(1, "a")))
    second = kept.write((UPDATE, order(1, "b")))
    with table.pin("one", second), table.pin("other", first):
        kept.write((UPDATE, order(1, "c")))
        assert kept.fold() == first
        assert table.base_epoch == first
        assert rows_at(table, first)[(1,)]["status"] == "a"
        assert rows_at(table, second)[(1,)]["status"] == "b"
    assert kept.fold() == kept.newest
    with pytest.raises(BaseGone):
        table.pin("late", second)
    kept.close()


def test_status_names_who_pins_and_for_how_long(kept: WrittenTable) -> None:
    table = kept.open()
    with table.pin("derived table sales") as pin:
        found = kept_status(kept.root, ORDERS.full_name)
        assert found is not None
        assert found.complete
        assert found.runs == 1
        assert found.size > 0
        (one,) = found.pins
        assert (one.owner, one.epoch, one.is_lost) == ("derived table sales", pin.epoch, False)
        assert 0 <= one.age_seconds < 60
    kept.close()


def test_a_pin_goes_with_its_process_unless_it_has_a_name(kept: WrittenTable) -> None:
    code = (
        "import os, sys; from headwater.versioned import VersionedTable\n"
        "table = VersionedTable.open(*sys.argv[1:4])\n"
        "table.pin('a reader'); table.pin('a query', name='a query')\n"
        "os.kill(os.getpid(), 9)"
    )
    epoch = kept.newest
    arguments = [kept.location, ORDERS.full_name, str(kept.root)]
    ended = subprocess.run([sys.executable, "-c", code, *arguments], env=os.environ, check=False)
    assert ended.returncode == -9
    table = kept.open()
    assert [pin.owner for pin in table.pins()] == ["a reader", "a query"]
    kept.write((INSERT, order(99)))
    assert kept.fold() == epoch
    assert [pin.owner for pin in table.pins()] == ["a query"]
    assert table.pin("a query", epoch, name="a query").epoch == epoch
    table.release("a query")
    assert kept.fold() == kept.newest
    kept.close()


def test_a_pin_is_lost_with_its_process_also_where_another_one_has_the_pid_now(kept: WrittenTable) -> None:
    table = kept.open()
    table.pin("a reader")
    (info,) = table.pins()
    assert not info.is_lost
    assert replace(info, ticks=info.ticks - 1).is_lost, "the pid is another process's now"
    assert replace(info, boot="of-another-boot").is_lost
    assert not replace(info, host="elsewhere", ticks=1).is_lost, "nobody here can tell"
    assert not replace(info, namespace=info.namespace + 1, ticks=1).is_lost, "pids mean others there"
    earlier = replace(info, boot="", namespace=0, ticks=0)
    assert not earlier.is_lost
    assert replace(earlier, pid=2**22 + 1).is_lost
    path = kept.sink.folder(ORDERS).path / "pins" / f"{info.id}.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"ticks": told["ticks"] - 1}))
    kept.write((INSERT, order(99)))
    assert kept.fold() == kept.newest, "it holds nothing"
    assert not table.pins()
    kept.close()


def test_a_pin_of_an_earlier_release_is_read(kept: WrittenTable) -> None:
    folder = kept.sink.folder(ORDERS).path / "pins"
    folder.mkdir(exist_ok=True)
    (folder / "old.json").write_text(
        '{"created_ms": 1, "epoch": 65536, "host": "h", "lasting": true, "owner": "o", "pid": 1, "table": "t"}'
    )
    (found,) = kept.open().pins()
    assert (found.owner, found.epoch, found.lasting, found.boot) == ("o", 65536, True, "")
    kept.close()


def test_history_is_not_read_while_a_table_is_pinned_and_it_is_not_pinned_while_it_is(kept: WrittenTable) -> None:
    table = kept.open()
    folder = kept.sink.folder(ORDERS).path
    with table.pin("reader") as pin:
        told = may_read(kept.root, folder, ORDERS.full_name, wanted=True)
        assert told == f"epoch {pin.epoch} is pinned by reader"
    assert may_read(kept.root, folder, ORDERS.full_name, wanted=True) is None
    with pytest.raises(NotComplete):
        table.pin("reader")
    assert may_read(kept.root, folder, ORDERS.full_name, wanted=False) is None
    table.pin("reader").release()
    kept.close()


def test_pins_and_folds_at_the_same_time_never_lose_an_epoch(kept: WrittenTable) -> None:
    """Readers pin the newest epoch, and read it, while another thread folds whatever it may."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        table = kept.open()
        try:
            while not stop.is_set():
                with table.pin("reader") as pin:
                    rows = rows_at(table, pin.epoch)
                    assert rows[(1,)] == rows_at(table, pin.epoch)[(1,)]
        except BaseException as error:
            failures.append(error)
        finally:
            table.close()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(40):
        kept.write((UPDATE, order(1, f"s{number}")))
        kept.fold()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert kept.fold() == kept.newest
    kept.close()
