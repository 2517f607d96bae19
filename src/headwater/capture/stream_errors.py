"""Errors of logs that streams write: what happened, under what the caller must do (:mod:`headwater.errors`)."""

from __future__ import annotations

from headwater.errors import ConflictError, FencedError, HeadwaterError, InputError, TransientError


class StreamLogError(HeadwaterError):
    """Any error of a log that a stream writes."""


class StreamFenced(StreamLogError, FencedError):
    """The stream was started again elsewhere, or another one has taken its store: this run has ended."""


class StoreTaken(StreamLogError, ConflictError):
    """The store is that of a capture, of another table or of another stream."""


class CheckpointBehind(StreamLogError, ConflictError):
    """The store has later batches of the stream than its checkpoint: that was restored, or lost a part."""


class StagedRowsLost(StreamLogError, TransientError):
    """Rows that a task has staged are gone: the batch must be made again."""


class StreamColumns(StreamLogError, InputError):
    """Columns that the log cannot have, or rows that it cannot hold."""
