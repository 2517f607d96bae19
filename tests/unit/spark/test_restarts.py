"""What is started again, and when."""

from __future__ import annotations

import errno
import os

import pytest

from headwater.errors import CapacityError, FencedError, HeadwaterError, InputError, TransientError
from headwater.sinks.errors import OtherAttempt, SinkLoginRefused, SinkUnwritable, StagedLost
from headwater.sources.dsn import DsnUnreadable
from headwater.sources.errors import LoginRefused, SnapshotExpired, SourceUnreachable
from headwater.spark.failure import UNSURE_ATTEMPTS, Failure, Remedy, RestartPolicy, ToldError, told
from headwater.system.retry import RESTART


def failure(remedy: Remedy) -> Failure:
    return Failure("Kind", remedy, "It failed.")


def test_pauses_grow_to_a_minute_and_are_forgotten_after_progress() -> None:
    policy = RestartPolicy(random_share=lambda: 1.0)
    pauses = [policy.pause(failure(Remedy.RETRY)) for _ in range(10)]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == RESTART.maximum
    policy.progressed()
    assert policy.pause(failure(Remedy.RETRY)) == 1.0


def test_a_pause_is_never_shorter_than_half_of_what_it_may_be() -> None:
    assert RestartPolicy(random_share=lambda: 0.0).pause(failure(Remedy.RETRY)) == 0.5


def test_what_needs_a_person_is_not_tried_again() -> None:
    assert RestartPolicy().pause(failure(Remedy.PERSON)) is None


def test_what_nobody_knows_is_tried_a_few_times() -> None:
    policy = RestartPolicy(random_share=lambda: 1.0)
    pauses = [policy.pause(failure(Remedy.UNSURE)) for _ in range(UNSURE_ATTEMPTS + 1)]
    assert None not in pauses[:-1]
    assert pauses[-1] is None


def test_a_refused_login_ends_the_first_start_and_is_tried_again_where_it_worked() -> None:
    policy = RestartPolicy(random_share=lambda: 1.0)
    assert policy.pause(failure(Remedy.LOGIN)) is None
    policy.started()
    assert [policy.pause(failure(Remedy.LOGIN)) for _ in range(10)][-1] == RESTART.maximum


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (TransientError("x"), Remedy.RETRY),
        (SourceUnreachable("x"), Remedy.RETRY),
        (SnapshotExpired("x"), Remedy.RETRY),
        (CapacityError("x"), Remedy.RETRY),
        (FencedError("x"), Remedy.UNSURE),
        (InputError("x"), Remedy.PERSON),
        (LoginRefused("x"), Remedy.LOGIN),
        (SinkLoginRefused("x"), Remedy.LOGIN),
        (DsnUnreadable("x"), Remedy.LOGIN),
        (HeadwaterError("x"), Remedy.PERSON),
        (ValueError("x"), Remedy.UNSURE),
        (RuntimeError("java.io.EOFException"), Remedy.RETRY),
        (RuntimeError("org.apache.spark.SparkException: Python worker failed to connect back."), Remedy.RETRY),
        (RuntimeError("Cannot call methods on a stopped SparkContext."), Remedy.RETRY),
        (StagedLost("x"), Remedy.RETRY),
        (OtherAttempt("x"), Remedy.RETRY),
        (RuntimeError("Python worker exited unexpectedly (crashed)"), Remedy.RETRY),
        (RuntimeError("Lost task 0.0 in stage 9.0: java.io.IOException: Stream closed"), Remedy.RETRY),
    ],
)
def test_an_error_says_what_is_to_be_done(error: Exception, remedy: Remedy) -> None:
    assert Failure.of(error).remedy is remedy


def test_a_full_disk_is_tried_again_whoever_says_it() -> None:
    full = SinkUnwritable("Nothing can be written to /lake: No space left on device.", next_step="Create it.")
    full.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    denied = SinkUnwritable("Nothing can be written to /lake: Permission denied.", next_step="Create it.")
    denied.__cause__ = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    text = "Job aborted\nTraceback:\nOSError: [Errno 28] No space left on device\n\tat org.apache.Spark"
    for failure in (Failure.of(full), Failure.of_text("QueryError", text)):
        assert failure.remedy is Remedy.RETRY
        assert "Make room" in str(failure.next_step)
    assert Failure.of(denied).remedy is Remedy.PERSON


def test_an_error_of_ours_survives_the_text_of_spark() -> None:
    @told
    def work() -> None:
        raise SourceUnreachable("The server is gone.", next_step="Wait.")

    with pytest.raises(ToldError) as caught:
        work()
    text = (
        "[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted: Lost task 0.0\n"
        f"Traceback (most recent call last):\n\nToldError: {caught.value}\n\n\tat org.apache.Spark\n"
    )
    assert Failure.of_text("StreamingQueryException", text) == Failure(
        "SourceUnreachable", Remedy.RETRY, "The server is gone.", "Wait."
    )


def test_a_text_that_only_looks_like_ours_is_told_by_its_last_error() -> None:
    text = 'Job aborted\nTraceback:\n  File "x.py"\nValueError: headwater-failure {broken\n\tat org.apache.Spark'
    found = Failure.of_text("QueryError", text)
    assert found.remedy is Remedy.UNSURE
    assert "ValueError" in found.message


def test_other_errors_pass_as_they_are() -> None:
    @told
    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        work()


def test_a_failure_keeps_where_it_was_raised_and_does_not_send_it_on() -> None:
    try:
        raise InputError("It is wrong.")
    except InputError as error:
        failure = Failure.of(error)
    assert "test_restarts.py" in failure.trace
    assert failure.trace.endswith("InputError: It is wrong.")
    assert "trace" not in failure.to_json()
    assert Failure.from_json(failure.to_json()) == failure
