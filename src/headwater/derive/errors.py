"""Errors of derived tables: what happened, under what the caller must do (:mod:`headwater.errors`)."""

from __future__ import annotations

from headwater.errors import ConflictError, HeadwaterError, InputError


class DeriveError(HeadwaterError):
    """Any error of :mod:`headwater.derive`."""


class InvalidDerivation(DeriveError, InputError):
    """A derivation that cannot be: its function, its tables or its columns."""


class KeyNotUnique(DeriveError, InputError):
    """The function gave more than one row of a key."""


class ResultChanged(DeriveError, ConflictError):
    """The function gives other columns than it did, and a person decides about that."""


class FunctionChanged(DeriveError, ConflictError):
    """The function is not the one that made what was delivered, and a person decides about that."""


class EpochLost(DeriveError, ConflictError):
    """The tables no longer have the epoch that the derived table was brought to."""
