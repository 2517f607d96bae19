"""Requests to the capture of a store: "capture this table, too" (:mod:`headwater.state.requests`).

The capture looks at a boundary, and seals its answer with what it did.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from headwater.state import open_reader, requests
from headwater.state.requests import Request

ADD_TABLES = "add_tables"
RENEW_TABLES = "renew_tables"
RENEW_SOURCE = "renew_source"
MIGRATE = "migrate"
COMPACT = "compact"
REMARK = "remark"


def ask(location: str | Path, kind: str, detail: dict[str, Any], seconds: float = 30.0) -> dict[str, Any]:
    """Ask the running capture of the store at *location*, and wait for its answer; what it tells of the result.

    :raises RequestFailed: what the capture answered. :raises NoAnswer: none in time.
    :raises StoreNotFound: there is no store.
    """
    open_reader(location).close()
    return requests.ask(str(location), Request(kind, detail), lambda: open_reader(location), seconds, "capture")


def leave(location: str | Path, kind: str, detail: dict[str, Any]) -> None:
    """Write a request down for the next capture of the store at *location*; nobody waits for the answer."""
    requests.leave(str(location), Request(kind, detail))


def remark(location: str | Path, log: str, text: str, plan: str) -> None:
    """Have the capture note *text* among the events of *log*: what a task saw while it read the history.

    It is noted once for each *plan*, whatever its numbers: many tasks may see the same.
    """
    kind = re.sub(r"\d+", "", text)
    request = hashlib.sha256("\0".join((log, plan, kind)).encode()).hexdigest()[:32]
    requests.leave(str(location), Request(REMARK, {"log": log, "text": text}, id=request))
