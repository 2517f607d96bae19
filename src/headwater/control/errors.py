"""Errors of requests: what happened, under what the caller must do (:mod:`headwater.errors`)."""

from __future__ import annotations

from headwater.errors import ConflictError, HeadwaterError, NotFoundError, TransientError


class ControlError(HeadwaterError):
    """Any error of :mod:`headwater.control`."""


class NoAnswer(ControlError, TransientError):
    """A request was not answered in time. It is queued, unless it was withdrawn."""


class RequestFailed(ControlError, ConflictError):
    """The answer to a request is that it could not be done."""


class NoSuchRequest(ControlError, NotFoundError):
    """No request with this id is queued: it was answered or withdrawn."""


class RequestBegun(ControlError, ConflictError):
    """A request cannot be withdrawn any more: its owner has begun with it."""
