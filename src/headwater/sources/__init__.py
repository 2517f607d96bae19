"""Sources: one package per database that Headwater reads, and what they have in common.

:mod:`~headwater.sources.table` describes a table, :mod:`~headwater.sources.offset` a place in a source's log,
:mod:`~headwater.sources.errors` what can go wrong.
"""

from __future__ import annotations
