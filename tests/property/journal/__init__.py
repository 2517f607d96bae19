"""Properties of the journal, against models."""

from __future__ import annotations
