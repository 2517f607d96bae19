"""Headwater: operational databases into Spark, exactly once."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Pipeline", "__version__"]


def __getattr__(name: str) -> Any:
    """``Pipeline`` is loaded when it is asked for: most parts of Headwater need none of it."""
    if name == "Pipeline":
        return import_module("headwater.pipeline.pipeline").Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
