"""What is asked of a sink that runs, and the delays after its errors."""

from __future__ import annotations

import threading
import time

import pytest

from headwater.log_store.testing import epoch
from headwater.sinks import HandOverTimeout, SinkBackoff, SinkControl, changed_settings


def test_32_only_a_setting_with_another_value_is_a_change() -> None:
    old = {"url": "a", "user": "b"}
    assert changed_settings(old, {}) == set()
    assert changed_settings(old, {"url": "a"}) == set()
    assert changed_settings(old, dict(old)) == set()
    assert changed_settings(old, {"missing": None}) == set()
    assert changed_settings(old, {"url": "A"}) == {"url"}
    assert changed_settings(old, {"url": "a", "user": None, "batch": "7"}) == {"user", "batch"}


def test_32_an_update_is_merged_and_one_that_changes_nothing_is_not_seen() -> None:
    control = SinkControl({"url": "a", "password": "secret"})
    seen: list[bool] = []
    for settings in ({"url": "a"}, {"url": "b", "password": None, "batch": "7"}):
        names = control.update(settings)
        seen.append(control.is_asked)
    assert names == {"url", "password", "batch"}
    assert control.settings() == {"url": "b", "batch": "7"}
    assert [*seen, control.is_asked] == [False, True, False], "taken with the settings"
    assert "secret" not in repr(SinkControl({"password": "secret"}))


def test_37_delays_are_bounded_and_begin_anew_after_a_long_life() -> None:
    backoff = SinkBackoff(jitter=lambda: 1.0)
    assert [backoff.next(0.5) for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.next(59.9) == 30
    assert [backoff.next(60.0), backoff.next(0.0)] == [1, 2]
    assert SinkBackoff(jitter=lambda: 0.25).next(0.0) == 0.25
    patient = SinkBackoff(jitter=lambda: 1.0)
    assert max(patient.next(0.0) for _ in range(2000)) == 30


def test_a_request_ends_a_sleep() -> None:
    for ask in (SinkControl.stop, lambda control: control.update({"a": "b"})):
        control = SinkControl()
        timer = threading.Timer(0.01, ask, (control,))
        timer.start()
        began = time.monotonic()
        control.sleep(30)
        assert time.monotonic() - began < 15
        timer.join()


def test_a_hand_over_waits_until_the_sink_lets_go_of_that_move() -> None:
    control = SinkControl()
    with pytest.raises(HandOverTimeout):
        control.hand_over(epoch(1), 0.01)
    assert control.must_hand_over, "the request stays"
    control.release()
    control.hand_over(epoch(1), 0.0)
    assert not control.is_asked
    with pytest.raises(HandOverTimeout):
        control.hand_over(epoch(2), 0.01)
    control.end()
    control.hand_over(epoch(2), 0.0)
