"""Whether compiled helpers are wanted: ``HEADWATER_PURE=1`` in the environment asks for Python alone."""

from __future__ import annotations

import os


def is_wanted() -> bool:
    """True unless Python alone was asked for."""
    return os.environ.get("HEADWATER_PURE", "0") in ("", "0")
