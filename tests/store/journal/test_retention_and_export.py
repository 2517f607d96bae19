"""Prune and export, on every store."""

from __future__ import annotations

import json
import os

import pytest
from tests.store.journal.backends import Backend

from headwater import failpoints
from headwater.cli.journal_export import HIDDEN, export_jsonl, export_markdown, hide
from headwater.errors import InputError
from headwater.journal import fs_store as journal_fs
from headwater.journal.entry import Entry, Limits, new_id
from headwater.journal.retention import BETWEEN, prune

DAY = 86_400_000


@pytest.fixture
def sessions(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Four sessions, changed 4, 3, 2 and 1 days before day 10."""
    store = backend.limited(Limits())
    made = [new_id() for _ in range(4)]
    for session in made:
        store.create_segment(session, new_id())
    changed = {session: (6 + place) * DAY for place, session in enumerate(made)}
    monkeypatch.setattr(store, "session_modified_at", lambda session: changed[session])
    return made


def verdicts(backend: Backend, **options: object) -> list[str]:
    return [judged.verdict for judged in prune(backend.store, now=10 * DAY, **options)]  # type: ignore[arg-type]


def test_prune_only_looks_unless_told_to_delete(backend: Backend, sessions: list[str]) -> None:
    """Scenario 46: dry run is the default, age threshold, oldest first."""
    assert verdicts(backend, older_than_ms=2 * DAY + 1) == ["expired", "expired", "recent", "recent"]
    assert len(backend.store.list_sessions()) == 4
    assert verdicts(backend, older_than_ms=2 * DAY + 1, dry_run=False) == ["deleted", "deleted", "recent", "recent"]
    assert sorted(backend.store.list_sessions()) == sorted(sessions[2:])


def test_prune_keeps_what_is_newest_or_owned(backend: Backend, sessions: list[str]) -> None:
    """Scenario 46."""
    with backend.store.own(sessions[1]):
        found = verdicts(backend, older_than_ms=0, keep_newest=1, dry_run=False)
    assert found == ["deleted", "owned", "deleted", "among the newest"]
    assert sorted(backend.store.list_sessions()) == sorted([sessions[1], sessions[3]])


def test_prune_never_takes_an_entry_that_came_after_its_look(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer appends between judgement and deletion; its session stays, whole."""
    times = iter(range(1, 1000))
    store = backend.limited(Limits(), lambda: next(times))
    session, segments = new_id(), [new_id() for _ in range(3)]
    for segment in segments:
        store.create_segment(session, segment, [Entry("x")])
        if backend.name == "fs":
            os.utime(store.location(session, segment), (1, 1))
    monkeypatch.setattr(
        failpoints, "hit", lambda name: name == BETWEEN and store.append(session, segments[1], Entry("y"))
    )
    now = 10**15
    assert [judged.verdict for judged in prune(store, older_than_ms=0, now=now, dry_run=False)] == ["recent"]
    monkeypatch.undo()
    assert [store.read_entry_count(session, segment) for segment in segments] == [1, 2, 1]
    store.create_segment(session, new_id())
    assert [judged.verdict for judged in prune(store, older_than_ms=0, now=now, dry_run=False)] == ["deleted"]
    assert store.list_sessions() == []


def test_a_session_of_many_segments_can_be_deleted(fs: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_fs, "_HELD", 2)
    session = new_id()
    for _ in range(5):
        fs.store.create_segment(session, new_id(), [Entry("x")])
    assert fs.store.delete_session(session)
    assert fs.store.list_segments(session) == []
    assert not fs.store.delete_session(session)


def test_prune_refuses_negative_bounds(backend: Backend) -> None:
    with pytest.raises(InputError):
        prune(backend.store, older_than_ms=-1, now=0)


@pytest.fixture
def ids(backend: Backend) -> tuple[str, str]:
    made = new_id(), new_id()
    backend.store.create_segment(*made)
    backend.store.append(
        *made,
        Entry(
            "config_changed",
            {"config": {"url": "postgresql://app:hush@db/shop", "Password": "hush", "deep": [{"api_key": "hush"}]}},
            ts=1_700_000_000_000,
        ),
    )
    backend.store.append(*made, Entry("notice", {"text": "```é```"}, ts=1_700_000_000_001))
    return made


def test_export_gives_one_json_object_per_entry(backend: Backend, ids: tuple[str, str]) -> None:
    lines = list(export_jsonl(backend.store.iter(*ids)))
    assert [json.loads(line)["kind"] for line in lines] == ["config_changed", "notice"]
    assert json.loads(lines[1]) == {"seq": 2, "ts": 1_700_000_000_001, "kind": "notice", "text": "```é```"}


def test_export_gives_a_readable_page(backend: Backend, ids: tuple[str, str]) -> None:
    page = "".join(export_markdown(backend.store.iter(*ids)))
    assert "## 2 · notice" in page
    assert "2023-11-14T22:13:20.001+00:00" in page
    assert "````json" in page


@pytest.mark.parametrize("export", [export_jsonl, export_markdown])
def test_secrets_are_hidden(backend: Backend, ids: tuple[str, str], export: object) -> None:
    assert callable(export)
    page = "".join(export(map(hide(), backend.store.iter(*ids))))
    assert "hush" not in page
    assert HIDDEN in page
    assert "db/shop" in page


@pytest.mark.parametrize(
    "text",
    [
        "postgres://app:hu@hush@db/shop",
        "host=db password=hush dbname=shop",
        "host=db PASSWORD = 'hush hush' dbname=shop",
        "https://db/shop?sslmode=on&api_key=hush&x=1",
    ],
)
def test_secrets_inside_texts_are_hidden_too(text: str) -> None:
    shown = hide()(Entry("x", {"dsn": text}))
    assert "hush" not in shown.fields["dsn"]
    assert "shop" in shown.fields["dsn"]


def test_a_time_that_no_calendar_has_can_be_exported(backend: Backend) -> None:
    made = new_id(), new_id()
    backend.store.create_segment(*made, [Entry("x", ts=(1 << 63) - 1)])
    assert f"{(1 << 63) - 1} ms" in "".join(export_markdown(backend.store.iter(*made)))
