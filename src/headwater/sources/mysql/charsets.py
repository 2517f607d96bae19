"""Character sets of MySQL and MariaDB: which one a collation is of, and its bytes as text.

Text becomes what the server itself makes of it when a client asks for ``utf8mb4``. Its own tables differ from Python's
codecs in places; those places are here, and a test compares every character of every set with the servers. What has no
equal becomes ``?``, as the server makes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Final

BINARY: Final = 63
"""The collation of bytes that are no text."""

_COLLATIONS: Final[dict[str, tuple[int, ...]]] = {
    "armscii8": (32, 64),
    "ascii": (11, 65),
    "big5": (1, 84),
    "binary": (63,),
    "cp1250": (26, 34, 44, 66, 99),
    "cp1251": (14, 23, 50, 51, 52),
    "cp1256": (57, 67),
    "cp1257": (29, 58, 59),
    "cp850": (4, 80),
    "cp852": (40, 81),
    "cp866": (36, 68),
    "cp932": (95, 96),
    "dec8": (3, 69),
    "eucjpms": (97, 98),
    "euckr": (19, 85),
    "gb18030": (248, 249, 250),
    "gb2312": (24, 86),
    "gbk": (28, 87),
    "geostd8": (92, 93),
    "greek": (25, 70),
    "hebrew": (16, 71),
    "hp8": (6, 72),
    "keybcs2": (37, 73),
    "koi8r": (7, 74),
    "koi8u": (22, 75),
    "latin1": (5, 8, 15, 31, 47, 48, 49, 94),
    "latin2": (2, 9, 21, 27, 77),
    "latin5": (30, 78),
    "latin7": (20, 41, 42, 79),
    "macce": (38, 43),
    "macroman": (39, 53),
    "sjis": (13, 88),
    "swe7": (10, 82),
    "tis620": (18, 89),
    "ucs2": (35, 90, *range(128, 160), *range(640, 672)),
    "ujis": (12, 91),
    "utf16": (54, 55, *range(101, 128), *range(672, 704)),
    "utf16le": (56, 62),
    "utf32": (60, 61, *range(160, 192), *range(736, 768)),
    "utf8mb3": (33, 76, 83, *range(192, 224), *range(576, 608)),
    "utf8mb4": (45, 46, *range(224, 248), *range(255, 512), *range(608, 640)),
}
_CHARSETS: Final = {number: charset for charset, numbers in _COLLATIONS.items() for number in numbers}
_MARIADB_NOPAD: Final = 1024
_MARIADB_UCA: Final = {8: "utf8mb3", 9: "utf8mb4", 10: "ucs2", 11: "utf16", 12: "utf32"}
"""By the number's high byte."""

_SINGLE: Final[dict[str, tuple[str, dict[int, str]]]] = {
    "armscii8": (
        "latin-1",
        {
            0xA1: (
                "\u2741\xa7\u0589)(\xbb\xab\u2014.\u055d,-\u055f\u2026\u055c\u055b\u055e\u0531\u0561\u0532\u0562\u0533\u0563\u0534"
                "\u0564\u0535\u0565\u0536\u0566\u0537\u0567\u0538\u0568\u0539\u0569\u053a\u056a\u053b\u056b\u053c\u056c\u053d\u056d\u053e\u056e\u053f\u056f\u0540"
                "\u0570\u0541\u0571\u0542\u0572\u0543\u0573\u0544\u0574\u0545\u0575\u0546\u0576\u0547\u0577\u0548\u0578\u0549\u0579\u054a\u057a\u054b\u057b\u054c"
                "\u057c\u054d\u057d\u054e\u057e\u054f\u057f\u0550\u0580\u0551\u0581\u0552\u0582\u0553\u0583\u0554\u0584\u0555\u0585\u0556\u0586\u2019'"
            )
        },
    ),
    "ascii": ("ascii", {}),
    "cp1250": ("cp1250", {}),
    "cp1251": ("cp1251", {}),
    "cp1256": ("cp1256", {0x8A: "?", 0x8F: "?", 0x98: "?", 0x9A: "?", 0x9F: "?", 0xAA: "?", 0xC0: "?", 0xFF: "?"}),
    "cp1257": ("cp1257", {}),
    "cp850": ("cp850", {}),
    "cp852": ("cp852", {}),
    "cp866": ("cp866", {0xFC: "\u207f\xb2"}),
    "dec8": (
        "latin-1",
        {
            0xA4: "?",
            0xA6: "?",
            0xA8: "\xa4",
            0xAC: "????",
            0xB4: "?",
            0xB8: "?",
            0xBE: "?",
            0xD0: "?",
            0xD7: "\u0152",
            0xDD: "\u0178?",
            0xF0: "?",
            0xF7: "\u0153",
            0xFD: "\xff??",
        },
    ),
    "geostd8": (
        "cp1252",
        {
            0x83: "?",
            0x88: "?",
            0x8A: "?",
            0x8C: "?",
            0x8E: "?",
            0x98: "???",
            0x9C: "?",
            0x9E: "??",
            0xC0: (
                "\u10d0\u10d1\u10d2\u10d3\u10d4\u10d5\u10d6\u10f1\u10d7\u10d8\u10d9\u10da\u10db\u10dc\u10f2\u10dd\u10de\u10df\u10e0\u10e1\u10e2\u10f3\u10e3\u10e4"
                "\u10e5\u10e6\u10e7\u10e8\u10e9\u10ea\u10eb\u10ec\u10ed\u10ee\u10f4\u10ef\u10f0\u10f5??????????"
                "?????????????\u2116??"
            ),
        },
    ),
    "greek": ("iso8859-7", {0xA1: "\u02bd\u02bc", 0xA4: "??", 0xAA: "?"}),
    "hebrew": ("iso8859-8", {0xAF: "\u203e"}),
    "hp8": ("hp_roman8", {}),
    "keybcs2": (
        "cp437",
        {
            0x80: "\u010c",
            0x83: "\u010f",
            0x85: "\u010e\u0164\u010d\u011b\u011a\u0139\xcd\u013e\u013a",
            0x8F: "\xc1",
            0x91: "\u017e\u017d",
            0x95: "\xd3\u016f\xda\xfd",
            0x9B: "\u0160\u013d\xdd\u0158\u0165",
            0xA4: "\u0148\u0147\u016e\xd4\u0161\u0159\u0155\u0154",
        },
    ),
    "koi8r": ("koi8-r", {}),
    "koi8u": ("koi8-u", {0x95: "\u2022"}),
    "latin1": ("cp1252", {0x81: "\x81", 0x8D: "\x8d", 0x8F: "\x8f\x90", 0x9D: "\x9d"}),
    "latin2": ("iso8859-2", {}),
    "latin5": ("iso8859-9", {}),
    "latin7": ("iso8859-13", {}),
    "macce": ("mac_latin2", {}),
    "macroman": ("mac_roman", {}),
    "swe7": ("ascii", {0x40: "\xc9", 0x5B: "\xc4\xd6\xc5\xdc", 0x60: "\xe9", 0x7B: "\xe4\xf6\xe5\xfc?"}),
    "tis620": ("tis-620", {0xA0: "\ufffd", 0xDB: "\ufffd\ufffd\ufffd\ufffd", 0xFC: "\ufffd\ufffd\ufffd\ufffd"}),
}
"""Sets of one byte per character: Python's codec, and what the server has from a byte on instead."""

_UTF8: Final = frozenset(("utf8mb3", "utf8mb4"))
_WIDE: Final = {"ucs2": "utf-16-be", "utf16": "utf-16-be", "utf16le": "utf-16-le", "utf32": "utf-32-be"}
_DOUBLE: Final = re.compile(rb"[\x80-\xff].|.", re.DOTALL)
_SHIFTED: Final = re.compile(rb"[\x81-\x9f\xe0-\xfc].|.", re.DOTALL)
_EXTENDED: Final = re.compile(rb"\x8f..|[\x80-\xff].|.", re.DOTALL)
_FOUR: Final = re.compile(rb"[\x81-\xfe][0-9][\x81-\xfe][0-9]|[\x81-\xfe].|.", re.DOTALL)
_MULTIPLE: Final = {
    "big5": ("big5", _DOUBLE),
    "cp932": ("cp932", _SHIFTED),
    "eucjpms": ("euc_jp", _EXTENDED),
    "euckr": ("cp949", _DOUBLE),
    "gb18030": ("gb18030", _FOUR),
    "gb2312": ("gb2312", _DOUBLE),
    "gbk": ("gbk", _DOUBLE),
    "sjis": ("shift_jis", _SHIFTED),
    "ujis": ("euc_jp", _EXTENDED),
}
"""Python's codec, and what one character is."""
_IBM: Final = (
    "ⅰⅱⅲⅳⅴⅵⅶⅷⅸⅹⅠⅡⅢⅣⅤⅥⅦⅧⅨⅩ＇\uff02㈱№℡炻仼僴凬匇匤﨎咊坙﨏塚增寬峵嵓﨑德悅愠敎昻晥晴朗栁﨓﨔橫"
    "櫢淸淲瀨凞猪甁皂皞益礰礼神祥福竧靖精綠緖羽荢﨟薰蘒﨡蠇諸譿賴赶﨣﨤逸郞都鄕﨧﨨閒隆﨩霻靍靑飯飼館馞髙魲鶴黑"
)


def charset_of(collation: int) -> str | None:
    """The name of the character set of a collation; ``None`` where it is not known."""
    if collation >= 2048:
        return _MARIADB_UCA.get(collation >> 8)
    return _CHARSETS.get(collation - _MARIADB_NOPAD if collation >= _MARIADB_NOPAD else collation)


def is_utf8(charset: str) -> bool:
    """Whether text in it needs no conversion. (ASCII may hold other bytes, in old tables.)"""
    return charset in _UTF8


@cache
def single_byte_table(charset: str) -> str | None:
    """The 256 characters of a set with one byte per character; ``None`` where it is none."""
    if charset not in _SINGLE:
        return None
    codec, other = _SINGLE[charset]
    table = list(bytes(range(256)).decode(codec, "replace").replace("\ufffd", "?"))
    for first, text in other.items():
        table[first : first + len(text)] = text
    return "".join(table)


def decode_text(charset: str, data: bytes) -> str:
    """The text of *data*.

    :raises ValueError: the character set is not known.
    """
    if charset in _UTF8:
        return data.decode(errors="replace")
    table = single_byte_table(charset)
    if table is not None:
        return data.decode("latin-1").translate(_translation(charset))
    if charset in _WIDE:
        return data.decode(_WIDE[charset], "replace").replace("\ufffd", "?")
    if charset not in _MULTIPLE:
        raise ValueError(f"The character set {charset!r} is not known.")
    codec, character = _MULTIPLE[charset]
    if not data.translate(None, _ascii_or_same(charset)):  # no byte that begins one of the others
        try:
            return data.decode(codec)
        except UnicodeDecodeError:
            pass
    other = _other(charset)
    return "".join(other.get(code) or _one(codec, code) for code in character.findall(data))


def _one(codec: str, code: bytes) -> str:
    try:
        return code.decode(codec)
    except UnicodeDecodeError:
        return "?"


@cache
def _translation(charset: str) -> Mapping[int, str]:
    table = single_byte_table(charset)
    assert table is not None
    return dict(enumerate(table))


@cache
def _ascii_or_same(charset: str) -> bytes:
    """The bytes with which no character begins that Python's codec has otherwise."""
    return bytes(set(range(256)) - {code[0] for code in _other(charset)})


@cache
def _other(charset: str) -> dict[bytes, str]:
    """Characters that Python's codec has otherwise, or not at all."""
    match charset:
        case "big5":
            lost = ("a15a", "a1c3", "a1c5", "a1fe", "a240", "a2cc", "a2ce")
            added = {b"\xf9" + bytes([0xD6 + place]): text for place, text in enumerate("碁銹裏墻恒粧嫺")}
            return {**{bytes.fromhex(code): "\ufffd" for code in lost}, **added}
        case "cp932":
            return dict.fromkeys((b"\x80", b"\xa0", b"\xfd", b"\xfe", b"\xff"), "?")
        case "sjis":
            return {b"\x81\x5f": "\\"}
        case "ujis":
            return {b"\xa1\xc0": "\\", **_private()}
        case "eucjpms":
            return {**_row13(), **_ibm(), **_private(), **_microsoft()}
        case "gb18030":
            return {b"\xa8\xbc": "\u1e3f"}
    return {}


def _private() -> dict[bytes, str]:
    """What users may fill: ten rows in each of two planes."""
    return {
        plane + bytes((0xF5 + row, 0xA1 + cell)): chr(first + 94 * row + cell)
        for plane, first in ((b"", 0xE000), (b"\x8f", 0xE3AC))
        for row in range(10)
        for cell in range(94)
    }


def _row13() -> dict[bytes, str]:
    """NEC's characters, which Python knows in their place in cp932."""
    found = {}
    for cell in range(94):
        shifted = bytes((0x87, 0x40 + cell + (cell >= 0x3F)))
        text = _one("cp932", shifted)
        if text != "?" and cell < 92:
            found[bytes((0xAD, 0xA1 + cell))] = text
    return found


def _ibm() -> dict[bytes, str]:
    codes = [bytes((0x8F, 0xF3, cell)) for cell in range(0xF3, 0xFF)]
    codes += [bytes((0x8F, 0xF4, cell)) for cell in range(0xA1, 0xFF)]
    return dict(zip(codes, _IBM, strict=True))


def _microsoft() -> dict[bytes, str]:
    pairs = {"a1c1": "～", "a1c2": "∥", "a1dd": "－", "a1f1": "￠", "a1f2": "￡", "a2cc": "￢"}
    pairs |= {"8fa2b7": "～", "8fa2c3": "￤"}
    return {bytes.fromhex(code): text for code, text in pairs.items()}
