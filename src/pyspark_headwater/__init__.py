"""Found by Spark under its name: ``spark.read.format("headwater")`` needs no registration."""

from __future__ import annotations

from headwater.spark.source import HeadwaterDataSource as DefaultSource

__all__ = ["DefaultSource"]
