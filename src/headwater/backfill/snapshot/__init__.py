"""Backfill from tables that we keep ourselves: a snapshot at one epoch, the change log after it, then live."""

from __future__ import annotations
