"""The error tree: *what the caller must do*, crossed with *what happened*.

Every error that Headwater raises on purpose is a :class:`HeadwaterError`. Two questions are
answered by its type:

* what to do: it derives from one of the categories below, and a caller catches the category;
* what happened: each package derives its own named errors (``headwater.journal.errors``,
  ``headwater.state.errors``, …) that keep the facts as fields.

The text says what happened and ends with the next step. It never holds row values or passwords.

============================  =========================================================
category                      what the caller must do
============================  =========================================================
:class:`TransientError`       try the same call again
:class:`InputError`           fix the argument, option or file and call again
:class:`LoginError`           fix the password; where the login worked before, try again until it does
:class:`NotFoundError`        name something that exists
:class:`ConflictError`        read the current state, decide, then call again
:class:`FencedError`          stop: another process owns this now
:class:`CorruptionError`      stop and repair or restore: stored bytes are not what was written
:class:`CapacityError`        make room (disk, limit), then call again
:class:`ClosedError`          open again: the handle was closed
============================  =========================================================
"""

from __future__ import annotations

from typing import Final


class HeadwaterError(Exception):
    """Base of the tree.

    :param message: what happened, one sentence.
    :param next_step: what to do about it: a command to run or a setting to change.
    """

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        self.message = message
        self.next_step = next_step
        super().__init__(f"{message} {next_step}" if next_step else message)


class TransientError(HeadwaterError):
    """Try the same call again."""


class InputError(HeadwaterError, ValueError):
    """Fix the input and call again. Nothing was written."""


class LoginError(InputError):
    """The login to a server was refused, or the password cannot be read.

    It is an error at the first start. It passes where the same login worked before: a password is being rotated.
    """


class NotFoundError(HeadwaterError, LookupError):
    """The named thing does not exist."""


class ConflictError(HeadwaterError):
    """Somebody else moved first: read the current state and decide."""


class FencedError(HeadwaterError):
    """Another process owns this now. Nothing was written; do not retry."""


class CorruptionError(HeadwaterError):
    """Stored bytes are not what was written."""


class CapacityError(HeadwaterError):
    """No room: a full disk, a size limit."""


class ClosedError(HeadwaterError):
    """The handle was closed before."""


PASSING: Final = (TransientError, CapacityError, LoginError)
"""What a run waits for: it keeps its state, tries again, and goes on by itself."""
