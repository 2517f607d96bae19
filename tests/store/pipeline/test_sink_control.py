"""Requests to the sinks of a pipeline whose store fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headwater.control.command import PauseSinks
from headwater.control.request import ANSWERS, INBOX, Request, leave
from headwater.pipeline.sink_control import PIPELINE, SinkControl
from headwater.state import Catalog, WriteBatch
from headwater.state.board import open_board
from headwater.state.errors import StoreUnavailable
from headwater.state.query_store import QueryReader, QueryStore

pytestmark = pytest.mark.store


def answers(state: str) -> dict[str, str]:
    """The errors that were answered, by request."""
    with QueryReader(state, PIPELINE) as reader, reader.snapshot() as view:
        return {key[0]: row[0] for key, row in Catalog.load(view).open(ANSWERS).scan(view, 0)}


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path / "state")


@pytest.fixture
def control(state: str) -> Iterator[SinkControl]:
    with closing(SinkControl(state)) as made:
        made.open()
        yield made


def until_seen(control: SinkControl) -> Request:
    while not (found := control.requests()):
        pass
    return found[0]


def test_what_was_done_is_not_done_again_when_its_answer_cannot_be_sealed(
    control: SinkControl, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(state, Request(PauseSinks()))
    request = until_seen(control)

    def away(store: QueryStore, batch: WriteBatch) -> None:
        raise StoreUnavailable("It is away.")

    with monkeypatch.context() as patch:
        patch.setattr(QueryStore, "seal", away)
        with pytest.raises(StoreUnavailable):
            control.answer(request, None, {"state": "paused"})
        with pytest.raises(StoreUnavailable):
            control.requests()
    assert open_board(state).list(INBOX)
    while open_board(state).list(INBOX):
        assert control.requests() == []
    assert answers(state) == {request.id: ""}


def test_answers_are_forgotten_after_a_day(control: SinkControl, state: str) -> None:
    old, new = Request(PauseSinks(), id=f"{1:032x}"), Request(PauseSinks())
    for request in (old, new, Request(PauseSinks())):
        leave(state, request)
        control.answer(until_seen(control), None)
    assert old.id not in answers(state)
    assert new.id in answers(state)
    assert len(answers(state)) == 2
