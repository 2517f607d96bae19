"""TLS as the URL asks for it: a certificate of another authority, or for another host, is refused before the login."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.certificates import Authority
from tests.servers.mariadb import MariaDbServer
from tests.servers.postgres import VERSIONS, PostgresServer

from headwater.databases.address import InvalidAddress
from headwater.errors import HeadwaterError
from headwater.sinks import mysql_session, postgres_session
from headwater.sinks.errors import SinkUnwritable
from headwater.sinks.mysql import MySqlSink
from headwater.sinks.postgres import PostgresSink
from headwater.sources.errors import SourceMisconfigured
from headwater.sources.mysql import connection as mysql
from headwater.sources.postgres import connection as postgres

pytestmark = pytest.mark.db


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder, "stranger")


@pytest.fixture(scope="module")
def postgres_server(authority: Authority) -> Iterator[PostgresServer]:
    """Its certificate is for 127.0.0.1, not for localhost."""
    with PostgresServer(VERSIONS[0]) as server:  # the builds from wheels have no TLS
        for path in authority.issue(server.base, "127.0.0.1"):
            server._own(path)
        certificate, key = server.base / "127.0.0.1.crt", server.base / "127.0.0.1.key"
        server.restart({"ssl": "on", "ssl_cert_file": str(certificate), "ssl_key_file": str(key)})
        yield server


@pytest.fixture(scope="module")
def mariadb_server(folder: Path, authority: Authority) -> Iterator[MariaDbServer]:
    certificate, key = authority.issue(folder, "127.0.0.1")
    with MariaDbServer({"ssl-cert": str(certificate), "ssl-key": str(key)}) as server:
        yield server


def of_postgres(server: PostgresServer, mode: str, authority: Authority | None, host: str = "127.0.0.1") -> str:
    root = "" if authority is None else f"&sslrootcert={authority.path}"
    return f"{server.dsn()}?sslmode={mode}{root}".replace("@127.0.0.1:", f"@{host}:")


def of_mariadb(server: MariaDbServer, mode: str, authority: Authority | None, host: str = "127.0.0.1") -> str:
    root = "" if authority is None else f"&ssl_ca={authority.path}"
    return f"{server.dsn}?ssl_mode={mode}{root}".replace("@127.0.0.1:", f"@{host}:")


def test_postgres_is_verified(postgres_server: PostgresServer, authority: Authority, stranger: Authority) -> None:
    for mode, host in (("verify-full", "127.0.0.1"), ("verify-ca", "localhost")):
        dsn = of_postgres(postgres_server, mode, authority, host)
        for connect in (postgres.connect, postgres.connect_replication, postgres_session.connect):
            with connect(postgres.Dsn(dsn)) as session:
                assert session.pgconn.ssl_in_use
    wrong = (
        of_postgres(postgres_server, "verify-full", stranger),
        of_postgres(postgres_server, "verify-ca", stranger),
        of_postgres(postgres_server, "verify-full", authority, "localhost"),
    )
    for dsn in wrong:
        for connect in (postgres.connect, postgres.connect_replication):
            with pytest.raises(SourceMisconfigured, match="certificate") as refused:
                connect(postgres.Dsn(dsn))
            assert_no_secret(refused.value, postgres_server.password)
        with pytest.raises(SinkUnwritable, match="certificate"):
            PostgresSink(dsn).check()


def test_mariadb_is_verified(mariadb_server: MariaDbServer, authority: Authority, stranger: Authority) -> None:
    for mode, host in (("VERIFY_IDENTITY", "127.0.0.1"), ("verify_ca", "localhost"), ("REQUIRED", "localhost")):
        dsn = of_mariadb(mariadb_server, mode, None if mode == "REQUIRED" else authority, host)
        for session in (mysql.connect(mysql.Dsn(dsn)), mysql_session.connect(mysql_session.address(dsn))):
            with session, session.cursor() as cursor:
                cursor.execute("SHOW STATUS LIKE 'Ssl_version'")
                assert str(cursor.fetchone()).count("TLS")
    wrong = (
        of_mariadb(mariadb_server, "VERIFY_IDENTITY", stranger),
        of_mariadb(mariadb_server, "VERIFY_CA", stranger),
        of_mariadb(mariadb_server, "VERIFY_IDENTITY", authority, "localhost"),
        of_mariadb(mariadb_server, "VERIFY_IDENTITY", None),
        f"{mariadb_server.dsn}?ssl_ca={stranger.path}",
    )
    for dsn in wrong:
        with pytest.raises(SourceMisconfigured, match="certificate") as refused:
            mysql.connect(mysql.Dsn(dsn))
        assert_no_secret(refused.value, mariadb_server.password)
        with pytest.raises(SinkUnwritable, match="certificate"):
            MySqlSink(dsn).check()


def test_certificates_that_cannot_be_read_are_named(folder: Path) -> None:
    (folder / "empty.pem").write_text("")
    for name in ("missing.pem", "empty.pem"):
        address = f"mysql://u@127.0.0.1:1/shop?ssl_ca={folder / name}"
        for connect in (mysql.Dsn(address).parameters, MySqlSink(address).check):
            with pytest.raises(InvalidAddress, match=name):
                connect()


def test_a_server_without_tls_is_refused_where_it_is_asked_for(
    newest_postgres_dsn: str, mariadb_server: MariaDbServer, authority: Authority
) -> None:
    with pytest.raises(SourceMisconfigured, match="does not support SSL"):
        postgres.connect(postgres.Dsn(f"{newest_postgres_dsn}?sslmode=require"))
    mariadb_server.stop()
    mariadb_server._settings = {"skip-ssl": "1"}
    mariadb_server.start()
    with pytest.raises(SourceMisconfigured, match="SSL is required"):
        mysql.connect(mysql.Dsn(of_mariadb(mariadb_server, "REQUIRED", None)))


@pytest.fixture
def newest_postgres_dsn(postgres_server: PostgresServer) -> str:
    postgres_server.restart({"ssl": "off"})
    return postgres_server.dsn()


def assert_no_secret(error: HeadwaterError, password: str) -> None:
    assert password not in str(error)
