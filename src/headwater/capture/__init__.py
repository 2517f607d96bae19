"""Capture: one process per database follows its log and writes the logs of all its tables, durable before the ack."""

from __future__ import annotations

from headwater.capture.capture import Capture, CaptureState
from headwater.capture.options import CaptureOptions
from headwater.capture.source_state import CapturedTable, SourceRecord, SourceState, TableState
from headwater.capture.statistics import CaptureStatistics

__all__ = [
    "Capture",
    "CaptureOptions",
    "CaptureState",
    "CaptureStatistics",
    "CapturedTable",
    "SourceRecord",
    "SourceState",
    "TableState",
]
