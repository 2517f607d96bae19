"""Backfill from a table that somebody else keeps: its snapshot at one version, then its change log, for ever.

There is no live edge: what is new is read from the change log, as everything after the snapshot.
"""

from __future__ import annotations
