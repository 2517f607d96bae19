"""Named failpoints: every durable step has one, and a crash test stops the process there.

A step declares its name once, at import, and hits it where a crash would matter::

    COMMIT = failpoints.register("state.lmdb.before_commit")
    ...
    failpoints.hit(COMMIT)

Nothing happens unless the environment variable ``HEADWATER_FAILPOINTS`` names the step, in the form
``name=action[@n][;name=action…]``: ``kill`` (a real SIGKILL of this process), ``raise`` (an
:class:`FailpointError`), ``sleep:SECONDS``, ``stop`` (a real SIGSTOP, until a SIGCONT). ``@n`` waits for the n-th hit.
The price of an inactive failpoint is one test of an empty dict.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from headwater.errors import HeadwaterError, InputError

VARIABLE = "HEADWATER_FAILPOINTS"

_registered: set[str] = set()


class FailpointError(HeadwaterError):
    """Raised by a failpoint whose action is ``raise``."""


@dataclass(slots=True)
class _Armed:
    action: str
    argument: float
    remaining: int


def register(name: str) -> str:
    """Declare a failpoint; returns *name* so that it can be kept as a constant."""
    _registered.add(name)
    return name


def registered() -> frozenset[str]:
    """All failpoints of the modules imported so far."""
    return frozenset(_registered)


def _parse(text: str) -> dict[str, _Armed]:
    armed: dict[str, _Armed] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, equals, action = part.partition("=")
        action, _, count = action.partition("@")
        verb, _, argument = action.partition(":")
        number = argument.replace(".", "", 1)
        if (
            not (name and equals)
            or verb not in ("kill", "raise", "sleep", "stop")
            or (count and not count.isdigit())
            or (number and not number.isdigit())
        ):
            raise InputError(
                f"Received {VARIABLE} with `{part}`; valid is name=kill, name=raise, name=stop or "
                "name=sleep:SECONDS, each with an optional @n."
            )
        armed[name] = _Armed(verb, float(argument or 0), int(count or 1))
    return armed


def arm(text: str) -> None:
    """Arm failpoints of this process; replaces what was armed. ``arm("")`` disarms all."""
    _armed.clear()
    _armed.update(_parse(text))


def hit(name: str) -> None:
    """Pass the failpoint *name*."""
    if not _armed:
        return
    armed = _armed.get(name)
    if armed is None:
        return
    armed.remaining -= 1
    if armed.remaining > 0 or (armed.remaining < 0 and armed.action != "sleep"):
        return
    if armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif armed.action == "sleep":
        time.sleep(armed.argument)
    elif armed.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise FailpointError(f"Failpoint {name} was told to raise.")


_armed: dict[str, _Armed] = _parse(os.environ.get(VARIABLE, ""))
