"""CDC backfill: the history of a table of an external database, while its changes are captured."""

from __future__ import annotations
