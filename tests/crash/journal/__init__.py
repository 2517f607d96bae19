"""Real faults against the journal: kill -9, full disks, many processes."""

from __future__ import annotations
