"""What tasks saw while they read the history is asked to be noted once, however many of them saw it."""

from __future__ import annotations

from pathlib import Path

from headwater.control.command import NoteEvent
from headwater.control.request import Answers, Inbox, leave_note
from headwater.state import Catalog, WriteBatch, open_writer


def test_what_many_tasks_of_a_plan_saw_is_one_request(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with open_writer(store) as writer, writer.snapshot() as view:
        batch = WriteBatch()
        answers = Answers(Catalog.load(view), writer, batch)
        for count in (3, 40):
            leave_note(store, "shop.orders", f"{count} values of total are null: string, and not long.", "plan 1")
        leave_note(store, "shop.orders", "5 values of total are null: string, and not long.", "plan 2")
        leave_note(store, "shop.orders", "5 values of note are null: string, and not long.", "plan 2")
        leave_note(store, "shop.lines", "5 values of note are null: string, and not long.", "plan 2")
        inbox = Inbox(str(store))
        found = inbox.open(answers, now=True)
        assert {type(request.command) for request in found} == {NoteEvent}
        assert len(found) == 4
        for request in found:
            answers.put(batch, request.id, None)
        leave_note(store, "shop.orders", "7 values of total are null: string, and not long.", "plan 1")
        assert not inbox.open(answers, now=True)
