"""`headwater journal …`, through typer's runner; as a real process in tests/crash/journal."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.store.journal.backends import Backend
from typer.testing import CliRunner, Result

from headwater.cli.main import app
from headwater.errors import HeadwaterError, InputError, NotFoundError
from headwater.journal.entry import Entry, new_id
from headwater.journal.fs_store import FsStore
from headwater.journal.run_log import RunLog


@pytest.fixture(params=["journal", "journal.db"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / str(request.param)


@pytest.fixture
def log(root: Path) -> RunLog:
    with FsStore(root, durability="none") as store:
        made = RunLog.start(store, "shop", {"sink": "delta", "password": "hush"})
        made.begin("schedule")
        made.record("barrier", {"epoch": 5})
        made.record("run_completed", {"interrupted": False})
    return made


def call(root: Path, *arguments: str) -> Result:
    command, *rest = arguments
    return CliRunner().invoke(app, ["journal", command, "--root", str(root), *rest])


def good(root: Path, *arguments: str) -> str:
    result = call(root, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refused(root: Path, *arguments: str) -> HeadwaterError:
    result = call(root, *arguments)
    assert isinstance(result.exception, HeadwaterError), result.output
    return result.exception


def parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_list_shows_sessions_segments_and_origins(root: Path, log: RunLog) -> None:
    text = good(root, "list")
    assert log.session in text
    assert log.segment in text
    good(root, "fork", log.segment, "--at", "2")
    rows = json.loads(good(root, "list", "--json"))
    assert [row["entries"] for row in rows] == [1, 4]
    assert rows[0]["origin"]["segment"] == log.segment
    assert rows[0]["pipeline"] == "shop"
    assert f"forked {log.segment[-8:]}" in good(root, "list", log.session, "--active")
    assert json.loads(good(root, "list", new_id(), "--json")) == []
    assert "No segments" in good(root, "list", new_id())


def test_show_prints_entries_from_either_end(root: Path, log: RunLog) -> None:
    text = good(root, "show", log.segment)
    for word in ("segment_start", "run_started", "barrier", "run_completed", str(log.head)):
        assert word in text
    assert [row["seq"] for row in parsed(good(root, "show", log.segment, "--json", "--from", "2", "--limit", "2"))] == [
        2,
        3,
    ]
    assert [row["seq"] for row in parsed(good(root, "show", log.segment, "--json", "--tail", "--limit", "2"))] == [3, 4]
    assert [row["fields"] for row in parsed(good(root, "show", log.segment, "--json", "--kind", "barrier"))] == [
        {"epoch": 5}
    ]


def test_a_segment_can_be_named_by_a_unique_part(root: Path, log: RunLog) -> None:
    assert good(root, "show", log.segment[-12:], "--json") == good(root, "show", log.segment, "--json")
    good(root, "fork", log.segment)
    error = refused(root, "show", log.segment[:4])
    assert isinstance(error, InputError)
    assert "2 segments" in str(error)
    for unknown in ("zzz", new_id(), ""):
        error = refused(root, "show", unknown)
        assert isinstance(error, NotFoundError)
        assert "headwater journal list" in str(error)


def test_a_missing_journal_is_not_made(root: Path) -> None:
    error = refused(root, "list")
    assert isinstance(error, NotFoundError)
    assert "--root" in str(error)
    assert not root.exists()


def test_verify_and_repair_find_and_move_damage(root: Path, log: RunLog) -> None:
    assert "none" in good(root, "verify")
    assert "nothing to repair" in good(root, "repair", log.segment)
    _damage(root, log)
    result = call(root, "verify", log.segment)
    assert result.exit_code == 1
    assert "line 3" in result.stdout
    assert f"headwater journal repair {log.segment}" in result.stderr
    (found,) = json.loads(call(root, "verify", "--json").stdout)
    assert (found["ok"], found["damages"][0]["line"]) == (False, 3)
    assert "segment_start" in call(root, "show", log.segment, "--limit", "1", "--json").stdout
    done = json.loads(good(root, "repair", log.segment, "--rescue", "--json"))
    assert done["head"].startswith("2-")
    assert done["quarantined"]
    assert done["rescued"]["entries"] == 3
    assert call(root, "verify").exit_code == 0


def _damage(root: Path, log: RunLog) -> None:
    with FsStore(root) as store:
        if root.is_dir():
            path = Path(store.location(log.session, log.segment))
            path.write_bytes(path.read_bytes().replace(b'"epoch":5', b'"epoch":6'))
        else:
            connection = store._connection()  # type: ignore[attr-defined]
            query = "UPDATE lines SET line=CAST(replace(CAST(line AS TEXT), '\"epoch\":5', '\"epoch\":6') AS BLOB)"
            connection.execute(query)


def test_a_damaged_segment_is_listed_as_such(root: Path, log: RunLog) -> None:
    with FsStore(root) as store:
        store.truncate(log.session, log.segment, 3)
    _damage(root, log)
    assert "damaged" in good(root, "list")


def test_fork_makes_a_new_session_or_segment(root: Path, log: RunLog) -> None:
    made = json.loads(good(root, "fork", log.segment, "--json"))
    assert made["session"] != log.session
    made = json.loads(good(root, "fork", log.segment, "--at", "3", "--json"))
    assert made["session"] == log.session
    assert "3 children" in good(root, "fork", log.segment, "--at", "0")
    error = refused(root, "fork", log.segment, "--at", "99")
    assert isinstance(error, NotFoundError)


def test_export_hides_secrets_unless_told_not_to(root: Path, log: RunLog, tmp_path: Path) -> None:
    assert "hush" not in good(root, "export", log.segment)
    assert "hush" in good(root, "export", log.segment, "--raw")
    assert "[hidden]" in good(root, "export", log.segment, "--hide", "epoch").splitlines()[2]
    target = tmp_path / "page.md"
    good(root, "export", log.segment, "--format", "markdown", "-o", str(target))
    assert target.read_text().startswith("# Segment")
    assert target.stat().st_mode & 0o777 == 0o600
    assert isinstance(refused(root, "export", log.segment, "-o", str(target)), InputError)


def test_prune_looks_before_it_deletes(root: Path, log: RunLog) -> None:
    assert "expired" in good(root, "prune", "--older-than", "0")
    assert json.loads(good(root, "prune", "--older-than", "1", "--json"))[0]["verdict"] == "recent"
    assert log.session in good(root, "list")
    assert "deleted" in good(root, "prune", "--older-than", "0", "--delete")
    assert json.loads(good(root, "list", "--json")) == []


@pytest.fixture
def odd(root: Path) -> dict[str, str]:
    """Segments that others made: odd headers, times and letters, damage, a later version."""
    made = {name: new_id() for name in ("header", "time", "damaged", "later")}
    session = new_id()
    with FsStore(root, durability="none") as store:
        start = Entry("segment_start", {"pipeline": 5, "forked_from": "nobody"})
        store.create_segment(session, made["header"], [start])
        kind = "\x1b[2Jevil"
        store.create_segment(session, made["time"], [Entry(kind, {"é": "\x9b2J"}, ts=(1 << 63) - 1)])
        for name, line in (("damaged", b"damage\n"), ("later", b'{"v":2,"seq":1}\n')):
            store.create_segment(session, made[name])
            Backend.put_bytes(SimpleNamespace(store=store), session, made[name], line)  # type: ignore[arg-type]
    return made


def test_no_segment_can_break_the_commands_for_the_others(root: Path, log: RunLog, odd: dict[str, str]) -> None:
    text = good(root, "list")
    assert all(name in text for name in (*odd.values(), log.segment))
    rows = {row["segment"]: row for row in json.loads(good(root, "list", "--json"))}
    assert rows[odd["header"]]["origin"] is None
    assert "error" in rows[odd["damaged"]]
    result = call(root, "verify")
    assert result.exit_code == 1
    assert log.segment in result.stdout
    found = {row["segment"]: row for row in json.loads(call(root, "verify", "--json").stdout)}
    assert {name: found[odd[name]]["ok"] for name in odd} == {
        "header": True,
        "time": True,
        "damaged": False,
        "later": False,
    }
    assert len(json.loads(good(root, "fork", log.segment, "--json"))) == 4


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_what_others_wrote_does_not_steer_the_terminal(
    root: Path, odd: dict[str, str], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for arguments in (("show", odd["time"]), ("list",), ("show", odd["time"], "--tail")):
        text = good(root, *arguments)
        assert "\x1b" not in text
        assert "\x9b" not in text
    assert "9223372036854775807 ms" in good(root, "show", odd["time"]).replace("\n", "")


@pytest.mark.parametrize("columns", ["40", "60", "80"])
def test_ids_are_never_cut_short(root: Path, log: RunLog, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert log.segment in good(root, "verify")
    assert log.segment in good(root, "show", log.segment)
    assert log.session in good(root, "prune", "--older-than", "0")


def test_an_export_that_fails_leaves_no_file(root: Path, odd: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    refused(root, "export", odd["damaged"], "-o", str(target))
    assert not target.exists()
    good(root, "export", odd["time"], "-o", str(target))
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


@pytest.mark.parametrize("days", ["inf", "nan", "-1"])
def test_impossible_ages_are_refused(root: Path, log: RunLog, days: str) -> None:
    assert log.segment
    assert call(root, "prune", "--older-than", days).exit_code == 2
