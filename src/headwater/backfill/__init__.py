"""Backfill: the history of tables, read beside their live changes, and the plan of a query that delivers both."""

from __future__ import annotations
