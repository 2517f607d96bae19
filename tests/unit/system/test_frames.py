"""What is kept of a traceback: frames, class names, and messages of our own errors."""

from __future__ import annotations

import pytest

from headwater.errors import InputError
from headwater.system.frames import frames_in, traceback_of

pytestmark = pytest.mark.unit


class DriverError(Exception):
    """An error of another library, whose text can hold row values."""


def read(value: str) -> None:
    raise DriverError(f"invalid value {value}")


def fail(value: str) -> None:
    try:
        read(value)
    except DriverError as error:
        raise InputError("The column cannot be read.", next_step="Change its type.") from error


def caught(value: str) -> BaseException:
    try:
        fail(value)
    except InputError as error:
        return error
    raise AssertionError


def test_frames_of_all_causes_are_kept_the_first_cause_first() -> None:
    trace = traceback_of(caught("Ann"))
    assert trace.index(", in read") < trace.index("DriverError") < trace.rindex(", in fail")
    assert 'raise DriverError(f"invalid value {value}")' in trace
    assert trace.endswith("InputError: The column cannot be read. Change its type.")


def test_messages_of_other_libraries_are_left_out() -> None:
    trace = traceback_of(caught("Ann"))
    assert "Ann" not in trace
    assert "\nDriverError\n" in trace


def test_an_error_without_frames_is_its_name() -> None:
    assert traceback_of(ValueError("Ann")) == "ValueError"


def test_an_endless_recursion_is_kept_short() -> None:
    def again(depth: int) -> None:
        again(depth + 1)

    try:
        again(0)
    except RecursionError as error:
        trace = traceback_of(error)
    assert len(trace.splitlines()) < 200


def test_a_text_without_frames_has_none() -> None:
    assert frames_in("") == frames_in("Traceback\nValueError: x") == ""


def test_frames_are_taken_from_the_text_of_an_error_of_spark() -> None:
    text = """PythonException: task failed
Traceback (most recent call last):
  File "/app/one.py", line 3, in stage
    write(row)
    ~~~~~^^^^^
  File "/app/two.py", line 5, in write
ValueError: invalid value Ann
    at java.lang.Thread
Traceback (most recent call last):
  File "/app/one.py", line 3, in stage
    write(row)
"""
    assert frames_in(text) == (
        '  File "/app/one.py", line 3, in stage\n    write(row)\n  File "/app/two.py", line 5, in write'
    )
