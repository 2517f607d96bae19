"""The key-value log store: a table's changes, durable, replayed from the right place, forgotten after delivery."""

from __future__ import annotations
