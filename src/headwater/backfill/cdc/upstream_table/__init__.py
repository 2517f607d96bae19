"""The table of the external database that a backfill reads."""

from __future__ import annotations
