"""Decimal128: its 16 bytes taken apart, and its text. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_BIAS: Final = 6176
_MOST: Final = 10**34 - 1


@dataclass(frozen=True, slots=True)
class Decimal128:
    """``-1 ** negative * coefficient * 10 ** exponent``, or what is no number."""

    negative: bool
    coefficient: int
    exponent: int
    special: str = ""

    @classmethod
    def read(cls, value: bytes) -> Decimal128:
        """:param value: 16 bytes, the low ones first."""
        high = int.from_bytes(value[8:], "little")
        negative = bool(high >> 63)
        if (high >> 58) & 31 == 31:
            return cls(False, 0, 0, "NaN")
        if (high >> 58) & 31 == 30:
            return cls(negative, 0, 0, "Infinity")
        if (high >> 61) & 3 == 3:
            # a coefficient of more digits than there are: zero, says the standard
            return cls(negative, 0, ((high >> 47) & 0x3FFF) - _BIAS)
        coefficient = (high & ((1 << 49) - 1)) << 64 | int.from_bytes(value[:8], "little")
        return cls(negative, coefficient if coefficient <= _MOST else 0, ((high >> 49) & 0x3FFF) - _BIAS)

    @property
    def text(self) -> str:
        """As MongoDB prints it: every digit, and an exponent where it is above 0 or the number is small."""
        sign = "-" if self.negative else ""
        if self.special:
            return sign + self.special
        digits = str(self.coefficient)
        adjusted = self.exponent + len(digits) - 1
        if self.exponent > 0 or adjusted < -6:
            point = f".{digits[1:]}" if len(digits) > 1 else ""
            return f"{sign}{digits[0]}{point}E{adjusted:+d}"
        if self.exponent == 0:
            return sign + digits
        whole = len(digits) + self.exponent
        if whole > 0:
            return f"{sign}{digits[:whole]}.{digits[whole:]}"
        return f"{sign}0.{'0' * -whole}{digits}"

    def unscaled(self, digits: int, scale: int) -> int | None:
        """The number of units of *scale* that it is; ``None``: it is none, or has more digits."""
        if self.special or (self.negative and not self.coefficient):
            return None
        return units(-self.coefficient if self.negative else self.coefficient, self.exponent, digits, scale)


def units(number: int, exponent: int, digits: int, scale: int) -> int | None:
    """``number * 10 ** exponent`` in units of *scale*, where it has no more than *digits* digits."""
    shift = exponent + scale
    if number == 0:
        return 0
    if shift >= 0:
        if shift > digits:
            return None
        number *= 10**shift
    else:
        if -shift > 40:
            return None
        quotient, left = divmod(number, 10**-shift)
        if left:
            return None
        number = quotient
    return number if abs(number) < 10**digits else None
