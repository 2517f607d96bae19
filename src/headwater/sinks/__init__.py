"""What stands between a log and a sink: which rows a sink is given, when it commits, what happens when it fails.

A sink is a :class:`SinkWriter` (or :class:`AsyncSinkWriter`). :class:`SinkLoop` builds it, feeds it from a reader of
the log store through a :class:`Delivery`, and builds it again after an error. docs/sinks.md tells how they go together.
"""

from __future__ import annotations

from headwater.sinks.backoff import SinkBackoff
from headwater.sinks.consume import SinkFailure, SinkLoop, SinkPhase, SinkStatus
from headwater.sinks.control import SinkControl, changed_settings
from headwater.sinks.delivery import AsyncDelivery, CheckpointDelivery, Delivery, Ended
from headwater.sinks.errors import (
    EpochTooLarge,
    HandOverTimeout,
    NotRewindable,
    OtherAttempt,
    SinkBusy,
    SinkDriverMissing,
    SinkError,
    SinkInputError,
    SinkSchemaError,
    SinkUnwritable,
)
from headwater.sinks.open import open_sink
from headwater.sinks.preprocess import Folding, PreprocessingReader, Preprocessor, SinkInput, SinkMode
from headwater.sinks.sink import Committed, HistoryPart, Mode, Sink, Staged, Token
from headwater.sinks.writer import AsyncSinkWriter, SinkWriter

__all__ = [
    "AsyncDelivery",
    "AsyncSinkWriter",
    "CheckpointDelivery",
    "Committed",
    "Delivery",
    "Ended",
    "EpochTooLarge",
    "Folding",
    "HandOverTimeout",
    "HistoryPart",
    "Mode",
    "NotRewindable",
    "OtherAttempt",
    "PreprocessingReader",
    "Preprocessor",
    "Sink",
    "SinkBackoff",
    "SinkBusy",
    "SinkControl",
    "SinkDriverMissing",
    "SinkError",
    "SinkFailure",
    "SinkInput",
    "SinkInputError",
    "SinkLoop",
    "SinkMode",
    "SinkPhase",
    "SinkSchemaError",
    "SinkStatus",
    "SinkUnwritable",
    "SinkWriter",
    "Staged",
    "Token",
    "changed_settings",
    "open_sink",
]
