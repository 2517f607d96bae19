"""The one reader of connection strings, and what an address shows of itself."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headwater.databases.address import Address, InvalidAddress, Url, one_of
from headwater.databases.mysql import MySqlAddress
from headwater.databases.secret_files import SecretUnreadable, in_file

SECRET = "p@ss/w:rd"
ESCAPED = "p%40ss%2Fw%3Ard"


class ShopAddress(Address):
    KIND = "a shop"
    SCHEMES = ("shop", "store")
    PORT = 80
    OPTIONS: ClassVar[Mapping[str, Any]] = {"size": int, "color": one_of("red", "blue")}
    NEXT_STEP = "Write shop://user@host/database."


@pytest.mark.parametrize(
    ("text", "hosts", "host", "port"),
    [
        ("shop://Db.Example:81/x", ("Db.Example:81",), "db.example", 81),
        ("shop://[2001:db8::1]:81/x", ("[2001:db8::1]:81",), "2001:db8::1", 81),
        ("shop://a:1,b:2/x", ("a:1", "b:2"), "a", 1),
        ("shop:///x", ("",), "", None),
    ],
)
def test_hosts_are_read_with_their_ports(text: str, hosts: tuple[str, ...], host: str, port: int | None) -> None:
    url = Url.parse(text)
    assert (url.hosts, url.host, url.port, url.database) == (hosts, host, port, "x")


def test_escapes_are_read_and_the_password_is_never_shown() -> None:
    url = Url.parse(f"shop://us%20er:{ESCAPED}@h/d%2Fb?note={ESCAPED}")
    assert (url.user, url.password, url.database, url.options) == ("us er", SECRET, "d/b", {"note": SECRET})
    assert SECRET not in repr(url)
    address = ShopAddress(f"store://app:{ESCAPED}@h/x?size=3&color=red", 5.0)
    assert (str(address), repr(address)) == ("shop://app@h:80/x", "ShopAddress('shop://app@h:80/x')")
    assert address.hide(f"refused {SECRET}") == "refused ***"
    assert address.options == {"size": 3, "color": "red"}
    assert pickle.loads(pickle.dumps(address)).timeout_seconds == 5.0


@pytest.mark.parametrize(
    "rest",
    ["h/x?colour=red", "h/x?color=green", "h/x?size=large", "h/x?size", "h:port/x", "h:99999/x", "a,b/x"],
)
@pytest.mark.parametrize("scheme", ["shop", "mall"])
def test_what_cannot_be_used_is_refused_without_being_repeated(scheme: str, rest: str) -> None:
    with pytest.raises(InvalidAddress, match=r"not one of a shop.*Write shop://") as refused:
        ShopAddress(f"{scheme}://app:{ESCAPED}@{rest}")
    shown = "".join(traceback.format_exception(refused.value))
    assert SECRET not in shown
    assert ESCAPED not in shown


def test_an_address_in_a_file_is_read_from_it(tmp_path: Path) -> None:
    file = tmp_path / "dsn"
    with pytest.raises(SecretUnreadable, match="No such file"):
        ShopAddress(in_file(file))
    file.write_text("shop://app@h/x\n")
    address = ShopAddress(in_file(file))
    assert (str(address), address.origin) == ("shop://app@h:80/x", in_file(file))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {}),
        ("ssl_mode=disabled", {"ssl_disabled": True}),
        ("ssl-mode=Required", {"ssl": {"verify_mode": "none"}}),
        ("unix_socket=%2Frun%2Fx&connect_timeout=3", {"unix_socket": "/run/x", "connect_timeout": 3}),
    ],
)
def test_mysql_is_connected_as_the_address_asks(options: str, expected: dict[str, Any]) -> None:
    parameters = MySqlAddress(f"mariadb://app:{ESCAPED}@h/x{f'?{options}' if options else ''}").parameters()
    plain = {"host": "h", "port": 3306, "user": "app", "password": SECRET, "connect_timeout": 10}
    assert parameters == plain | expected


@pytest.mark.parametrize("option", ["ssl_mode=maybe", "tinyint1=boolean", "connect_timeout=long"])
def test_options_that_mysql_does_not_have_are_refused(option: str) -> None:
    with pytest.raises(InvalidAddress, match=r"options are connect_timeout, ssl_ca, ssl_mode"):
        MySqlAddress(f"mysql://app@h/x?{option}")
