"""Errors of a pipeline: what happened, under what the caller must do (:mod:`headwater.errors`)."""

from __future__ import annotations

from headwater.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    HeadwaterError,
    InputError,
    NotFoundError,
)


class PipelineError(HeadwaterError):
    """Any error of :mod:`headwater.pipeline`."""


class ConfigError(PipelineError, InputError):
    """A pipeline's settings cannot be used.

    :ivar key: the key that is wrong, with dots; empty when it is the whole file.
    """

    def __init__(self, message: str, *, key: str = "", next_step: str | None = None) -> None:
        self.key = key
        super().__init__(message, next_step=next_step)


class ConfigNotFound(PipelineError, NotFoundError):
    """There is no such file."""


class AlreadyRunning(PipelineError, FencedError):
    """Another process runs a pipeline over the same store.

    :ivar owner: which, for a person.
    """

    def __init__(self, place: str, owner: str, pid: int) -> None:
        self.owner, self.pid = owner, pid
        super().__init__(
            f"The pipeline in {place} is run already, by {owner}.",
            next_step=f"Look at it: headwater status. Stop it: kill {pid}",
        )


class PipelineFailed(PipelineError):
    """A part of the pipeline stopped and needs a person."""


class NotStarted(PipelineError, ClosedError):
    """It does not run."""


class SinkRequestFailed(PipelineError, ConflictError):
    """What was asked of a sink could not be done."""


class CannotRewind(PipelineError, ConflictError):
    """A sink cannot be set back to where it was asked to."""
