"""Where rows are delivered: tasks stage them, one process commits them with a token. Import from the modules."""

from __future__ import annotations
