"""Headwater: operational databases into Spark, exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.pipeline.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["Pipeline", "__version__"]


def __getattr__(name: str) -> Any:
    """``Pipeline`` is loaded when it is asked for: most parts of Headwater need none of it."""
    if name == "Pipeline":
        from headwater.pipeline.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
