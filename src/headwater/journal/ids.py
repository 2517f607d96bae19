"""Identifiers of sessions and segments: UUIDv7, whose string order is creation order. Lower case with hyphens only."""

from __future__ import annotations

import re

from uuid_utils import uuid7

from headwater.journal.errors import InvalidNameError

_CANONICAL = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.ASCII)


def new_id() -> str:
    """A new id, above all that this process generated before."""
    return str(uuid7())


def is_id(text: str) -> bool:
    """Is *text* a UUID in canonical spelling?"""
    return _CANONICAL.fullmatch(text) is not None


def check_id(text: str, what: str) -> str:
    """*text* itself.

    :raises InvalidNameError: when it is not a lower-case hyphenated UUID.
    """
    given: object = text
    if not isinstance(given, str) or not is_id(given):
        raise InvalidNameError(
            f"Received {what} `{text}`; valid is a lower-case hyphenated UUID.",
            next_step="Create one with headwater.journal.new_id().",
        )
    return text
