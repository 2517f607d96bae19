"""Places in the log between which a snapshot lies.

A commit is in the log an instant, with semi-synchronous replication long, before other sessions see it. So there are
two questions: which place has only commits before it that everybody sees from now on (:func:`seen_place`), and which
has every commit before it that this session's snapshot shows (:func:`place_after`).

========================  =====================================================  =======================================
server                    seen by everybody                                      shown by an open snapshot
========================  =====================================================  =======================================
MariaDB                   the log's end, once a new consistent snapshot tells    the log's end
                          (``binlog_snapshot_position``) that it has come there
MySQL with GTIDs          ``gtid_executed``: a commit is added when it is seen   the same with ``gtid_owned``: commits
                                                                                 that are on their way
MySQL without             the log's end, once no session is left that was        the log's end
                          committing when it was asked for
========================  =====================================================  =======================================
"""

from __future__ import annotations

import re
import time
from typing import Final

import pymysql

from headwater.sources.errors import SourceBusy, SourceMisconfigured
from headwater.sources.mysql.connection import Connection, ask
from headwater.sources.mysql.gtid import MySqlGtids
from headwater.sources.mysql.offset import MySqlOffset, place_in_file
from headwater.sources.mysql.server import Server, executed, log_position

_TRIES: Final = 500
_PAUSE_SECONDS: Final = 0.01
_COMMIT_SECONDS: Final = 0.5
"""How long a commit takes from the log to other sessions, where the user may not see who commits (PROCESS)."""
_FRESH_SECONDS: Final = 0.2
"""The server tells of its transactions from a cache that is a tenth of a second old at most."""
_STATEMENT_SECONDS: Final = 1.0
"""After that only who says that it commits is waited for; others run a long statement."""
_COMMITS: Final = re.compile("commit|semi-sync|query end", re.IGNORECASE)
_MAY_NOT_SEE: Final = 1227

_BEGIN: Final = "START TRANSACTION WITH CONSISTENT SNAPSHOT"
_SNAPSHOT: Final = "SHOW STATUS LIKE 'binlog_snapshot_%%'"


def seen_place(session: Connection, server: Server) -> MySqlOffset:
    """A place of now: everybody who reads from now on sees all that committed before it.

    :raises SourceBusy: a commit is in the log and is not seen for seconds.
    :raises SourceMisconfigured: commits are seen in another order than they are logged.
    """
    if server.version.is_mariadb:
        return _seen_by_mariadb(session, server)
    if ask(session, "SELECT @@GLOBAL.binlog_order_commits AS ordered")[0]["ordered"] != "1":
        raise SourceMisconfigured(
            "The server commits in another order than it logs: no place in its log tells what a snapshot has.",
            next_step="Run: SET GLOBAL binlog_order_commits = ON;",
        )
    if server.numbers_transactions:
        return MySqlOffset("", 0, executed(session, server), server.server)
    place = log_position(session, server)
    _wait_for_commits(session)
    return place


def place_after(session: Connection, server: Server) -> MySqlOffset:
    """A place of now: the snapshot that *session* has open shows nothing that committed after it."""
    if server.version.is_mariadb:
        return MySqlOffset("", 0, executed(session, server), server.server)
    if server.numbers_transactions:
        # in this order: a commit that is owned no longer is executed
        owned = str(ask(session, "SELECT @@GLOBAL.gtid_owned AS gtids")[0]["gtids"] or "")
        done = executed(session, server)
        assert isinstance(done, MySqlGtids)
        return MySqlOffset("", 0, done.union(MySqlGtids.parse(re.sub(r"#\d+", "", owned))), server.server)
    return log_position(session, server)


def _wait_for_commits(session: Connection) -> None:
    """Until those who may have been committing just now are done. :raises SourceBusy: one is not for seconds."""
    time.sleep(_FRESH_SECONDS)
    try:
        left = _at_work(session)
    except pymysql.err.Error as error:
        if error.args and error.args[0] == _MAY_NOT_SEE:
            time.sleep(_COMMIT_SECONDS)
            return
        raise
    begun = time.monotonic()
    for _ in range(_TRIES):
        waited = time.monotonic() - begun
        if not any(_COMMITS.search(state) or waited < _STATEMENT_SECONDS for state in left.values()):
            return
        time.sleep(_PAUSE_SECONDS)
        now = _at_work(session)
        left = {number: now[number] for number in left if number in now}
    raise _is_not_shown()


def _at_work(session: Connection) -> dict[str, str]:
    """What the session of each transaction does in which a statement runs, by the number of the transaction."""
    of_session = {
        str(row["trx_mysql_thread_id"]): str(row["trx_id"])
        for row in ask(session, "SELECT trx_id, trx_mysql_thread_id FROM information_schema.innodb_trx")
    }
    return {
        of_session[str(row["id"])]: str(row["state"] or "")
        for row in ask(session, "SHOW PROCESSLIST")
        if str(row["id"]) in of_session and row["command"] != "Sleep"
    }


def _is_not_shown() -> SourceBusy:
    return SourceBusy(
        "The server has a commit in its log that it does not show: it waits for a replica (semi-synchronous).",
        next_step="Look whether the replicas answer: SHOW STATUS LIKE 'Rpl_semi_sync%'",
    )


def _seen_by_mariadb(session: Connection, server: Server) -> MySqlOffset:
    # in this order: the file's end is not before the transactions
    gtids = executed(session, server)
    end = ask(session, "SHOW MASTER STATUS")
    if not end:
        log_position(session, server)  # tells what is wrong
    wanted = place_in_file(str(end[0]["file"]), int(end[0]["position"]))
    for _ in range(_TRIES):
        ask(session, _BEGIN)
        try:
            found = {str(row["variable_name"]).lower(): str(row["value"]) for row in ask(session, _SNAPSHOT)}
        finally:
            ask(session, "ROLLBACK")
        if place_in_file(found["binlog_snapshot_file"], int(found["binlog_snapshot_position"])) >= wanted:
            return MySqlOffset("", 0, gtids, server.server)
        time.sleep(_PAUSE_SECONDS)
    raise _is_not_shown()
