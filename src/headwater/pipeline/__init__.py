"""A pipeline: one database, its tables, the places that they are delivered to, and what keeps all of it running."""

from __future__ import annotations
