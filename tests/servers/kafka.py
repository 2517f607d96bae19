"""A real Kafka broker for tests: one node in KRaft mode, on loopback, in a temporary directory, ended with its owner.

A watchdog process holds a pipe to us: when we are gone, also by ``kill -9``, it ends the broker and removes its files.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._scram import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion
from tests.servers.binaries import kafka_jars

_JAVA = ("java", "-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_CLUSTER = "aGVhZHdhdGVyLXRlc3RzMQ"
_SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},LOGIN://127.0.0.1:{login},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{advertised},LOGIN://127.0.0.1:{login}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,LOGIN:SASL_PLAINTEXT
sasl.enabled.mechanisms=SCRAM-SHA-256
listener.name.login.scram-sha-256.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
log.dirs={base}/data
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.replication.factor=1
offsets.topic.num.partitions=2
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=2
log.cleaner.dedupe.buffer.size=4194304
"""
_WATCHDOG = """
cat >/dev/null
pid=$(cat "$1/pid" 2>/dev/null)
if [ -n "$pid" ] && [ "$(readlink "/proc/$pid/cwd")" = "$1" ]; then kill -KILL "$pid"; sleep 1; fi
rm -rf "$1"
"""


class KafkaServer:
    """One broker, which is its own controller.

    :param advertise: from its port, the port that clients are sent to: that of a proxy.
    """

    def __init__(self, advertise: Callable[[int], int] | None = None) -> None:
        self._classes = f"{kafka_jars()}/*"
        self.base = Path(tempfile.mkdtemp(prefix="headwater-kafka-", dir="/tmp"))
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG, "watchdog", str(self.base)], stdin=subprocess.PIPE, start_new_session=True
        )
        self.port, controller, self._login = _free_ports()
        self._advertised = advertise(self.port) if advertise else self.port
        text = _SETTINGS.format(
            port=self.port, advertised=self._advertised, controller=controller, login=self._login, base=self.base
        )
        (self.base / "server.properties").write_text(text)
        try:
            self._run("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", "server.properties").wait(60)
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def brokers(self) -> str:
        return f"127.0.0.1:{self._advertised}"

    @property
    def login_brokers(self) -> str:
        """Where users log in with a password, by ``SASL_PLAINTEXT`` and ``SCRAM-SHA-256``."""
        return f"127.0.0.1:{self._login}"

    def set_password(self, user: str, password: str) -> None:
        """Create *user*, or give it another password."""
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        change = UserScramCredentialUpsertion(user, scram, password.encode())
        admin = AdminClient({"bootstrap.servers": self.brokers})
        for done in admin.alter_user_scram_credentials([change]).values():
            done.result(30)

    @property
    def log(self) -> str:
        return (self.base / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = self._run("kafka.Kafka", "server.properties")
        (self.base / "pid").write_text(str(self._process.pid))
        deadline = time.monotonic() + 90
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The broker did not start:\n{self.log[-3000:]}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                break
            time.sleep(0.05)
        with contextlib.suppress(KafkaException):
            AdminClient({"bootstrap.servers": self.brokers}).list_topics(timeout=30)

    def kill9(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def close(self) -> None:
        self.kill9()
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait(30)
        shutil.rmtree(self.base, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def partitions(self, topic: str) -> int:
        return len(AdminClient({"bootstrap.servers": self.brokers}).list_topics(timeout=30).topics[topic].partitions)

    def read(self, topic: str, isolation: str = "read_committed") -> list[tuple[int, bytes, bytes | None]]:
        """Partition, key and value of all messages, in the order of each partition."""
        return read_topic(self.brokers, topic, isolation)

    def _run(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.base / "log").open("ab") as log:
            return subprocess.Popen(
                [*_JAVA, "-cp", self._classes, *arguments],
                cwd=self.base,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def read_topic(brokers: str, topic: str, isolation: str = "read_committed") -> list[tuple[int, bytes, bytes | None]]:
    """Partition, key and value of all messages, in the order of each partition; nothing where there is no topic."""
    settings: dict[str, Any] = {
        "bootstrap.servers": brokers,
        "group.id": "tests",
        "isolation.level": isolation,
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 20,
    }
    consumer = Consumer(settings)
    topics = AdminClient({"bootstrap.servers": brokers}).list_topics(timeout=30).topics
    left = set(topics[topic].partitions if topic in topics else ())
    found: list[tuple[int, bytes, bytes | None]] = []
    try:
        consumer.assign([TopicPartition(topic, place, OFFSET_BEGINNING) for place in left])
        while left:
            message = consumer.poll(30)
            assert message is not None, f"{topic} could not be read"
            error = message.error()
            if error is None:
                found.append((message.partition() or 0, message.key() or b"", message.value()))
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                left.discard(message.partition() or 0)
    finally:
        consumer.close()
    return found


def _free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as other, socket.socket() as third:
        for end in (one, other, third):
            end.bind(("127.0.0.1", 0))
        return [int(end.getsockname()[1]) for end in (one, other, third)]
