"""The delays of a sink whose deliveries fail are those of a rewind of its logs: the one policy of deliveries."""

from __future__ import annotations

import random
from typing import Any, cast

from headwater.errors import TransientError
from headwater.pipeline.sink_control import DesiredState
from headwater.pipeline.supervised_query import SinkState, SupervisedQuery
from headwater.system.retry import DELIVERY, REWIND_BACKOFF_FACTOR, REWIND_BASE_DELAY, REWIND_MAX_DELAY


class Failing(SupervisedQuery):
    """Every start fails but those that are told to deliver a batch."""

    kind = "sink"

    def __init__(self) -> None:
        self.now, self.pauses, self.delivers = 0.0, list[float](), False
        config = type("Config", (), {"logs": "logs"})()
        control = type("Control", (), {"desired_state": lambda self, label: DesiredState.RUNNING})()
        super().__init__(
            cast("Any", config), "mirror", cast("Any", None), self._noted, cast("Any", control), clock=lambda: self.now
        )

    def _noted(self, kind: str, fields: dict[str, Any]) -> None:
        if fields["event"] == "sink_restarts":
            self.pauses.append(fields["pause_seconds"])

    def _start(self) -> None:
        if self.delivers:
            self._progressed()
        raise TransientError("The sink is away.")

    def _look(self) -> None: ...
    def _lose(self) -> None: ...
    def ask_to_stop(self) -> None: ...
    def stop(self) -> None: ...
    def _rest(self, state: SinkState) -> None: ...
    def _forget(self) -> list[str]:
        return []

    def _let_back(self) -> list[str]:
        return []

    def _rewind(self, epoch: int | None) -> dict[str, Any]:
        return {}


def test_the_policy_is_one_two_four_up_to_three_minutes_with_full_jitter() -> None:
    assert (REWIND_BASE_DELAY, REWIND_BACKOFF_FACTOR, REWIND_MAX_DELAY) == (1, 2, 180)
    assert [DELIVERY.ceiling(failures) for failures in range(1, 11)] == [1, 2, 4, 8, 16, 32, 64, 128, 180, 180]
    assert DELIVERY.delay(3, lambda: 0.0) == 0.0
    assert DELIVERY.delay(3, lambda: 0.5) == 2.0


def test_a_sink_that_fails_waits_as_long_and_progress_resets_it() -> None:
    random.seed(20261115)
    expected = [round(DELIVERY.delay(failures), 1) for failures in (*range(1, 11), 1, 2)]
    random.seed(20261115)
    query = Failing()
    for _ in range(10):
        query.now += REWIND_MAX_DELAY + 1
        query.step()
    query.now += REWIND_MAX_DELAY + 1
    query.delivers = True
    query.step()
    query.delivers = False
    query.now += REWIND_MAX_DELAY + 1
    query.step()
    assert query.pauses == expected
    assert max(query.pauses) > 60, "longer than a process that is started again"


def test_it_is_not_started_before_its_pause_is_over() -> None:
    query = Failing()
    query.step()
    while query.pauses == [0.0]:  # a very short one
        query = Failing()
        query.step()
    query.step()
    assert (len(query.pauses), query.state) == (1, SinkState.WAITING)
    query.now += REWIND_BASE_DELAY
    query.step()
    assert len(query.pauses) == 2
