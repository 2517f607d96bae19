"""Verify: the tables of a source against what the sinks of a pipeline show of them, while everything runs."""

from __future__ import annotations

from headwater.pipeline.verify.check import Findings, Options
from headwater.pipeline.verify.verification import Verification

__all__ = ["Findings", "Options", "Verification"]
