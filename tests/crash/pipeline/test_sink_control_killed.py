"""Processes that ask, or do what is asked of a sink, are killed between the durable steps: nothing is done twice.

What a sink is to be and the answer are one seal: there is no moment at which one of them is durable alone.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from headwater import failpoints
from headwater.control import request as control_request
from headwater.control.command import PauseSinks
from headwater.pipeline.sink_control import DesiredState, SinkControl, ask_pipeline
from headwater.state import board
from headwater.state.engines import embedded

pytestmark = pytest.mark.crash

_PROCESSES = multiprocessing.get_context("forkserver")


DONE = failpoints.register("test.done")
"""What was asked is done, and nothing of it is sealed."""


def drive(state: str, done: str, armed: str) -> None:
    """A driver that does what is asked until there is nothing."""
    failpoints.arm(armed)
    with closing(SinkControl(state)) as control:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            for request in control.requests():
                if control.desired_state("delta") is DesiredState.PAUSED:
                    Path(done).write_text("twice")
                control.put_desired_state("delta", DesiredState.PAUSED)
                failpoints.hit(DONE)
                control.answer(request, None, {"sinks": {"delta": "paused"}}, ["delta"])


def send(state: str, answer: str, armed: str) -> None:
    failpoints.arm(armed)
    effect = ask_pipeline(state, PauseSinks("delta"), 60)
    Path(answer).write_text(effect["sinks"]["delta"])


@pytest.mark.parametrize(
    ("step", "is_sealed"),
    [
        (control_request.AFTER_CLAIM, False),
        (DONE, False),
        (embedded.SEAL_BEFORE_COMMIT, False),
        (embedded.SEAL_AFTER_COMMIT, True),
        (control_request.BEFORE_REMOVE, True),
    ],
)
def test_a_driver_that_is_killed_has_done_what_it_answered_once(step: str, is_sealed: bool, tmp_path: Path) -> None:
    state, done, answer = str(tmp_path / "state"), tmp_path / "done", tmp_path / "answer"
    with closing(SinkControl(state)) as control:
        control.open()  # its tables: the only seals from now on are of requests
    sender = _PROCESSES.Process(target=send, args=(state, str(answer), ""))
    sender.start()
    try:
        while not board.open_board(state).list(control_request.INBOX):
            assert sender.is_alive()
        seals = 2 if step.startswith("state.") else 1  # the first one opens the section
        killed = _PROCESSES.Process(target=drive, args=(state, str(done), f"{step}=kill@{seals}"))
        killed.start()
        killed.join(60)
        assert killed.exitcode == -signal.SIGKILL
        with closing(SinkControl(state)) as control:
            assert control.desired_state("delta") is (DesiredState.PAUSED if is_sealed else DesiredState.RUNNING)
        drive(state, str(done), "")
        sender.join(60)
        assert (sender.exitcode, answer.read_text()) == (0, "paused")
        assert not done.exists()
        assert not board.open_board(state).list(control_request.INBOX)
    finally:
        sender.kill()


def test_a_request_survives_the_process_that_asks(tmp_path: Path) -> None:
    state, done = str(tmp_path / "state"), tmp_path / "done"
    sender = _PROCESSES.Process(target=send, args=(state, str(tmp_path / "answer"), f"{board.AFTER_CREATE}=kill"))
    sender.start()
    sender.join(60)
    assert sender.exitcode == -signal.SIGKILL
    drive(state, str(done), "")
    with closing(SinkControl(state)) as control:
        assert control.desired_state("delta") is DesiredState.PAUSED
