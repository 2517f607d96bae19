"""moto's S3 server for tests, in a process of its own on loopback: a mock, because no S3 server is here.

It shows our addresses, and that of two puts of one name one is refused; not S3's latencies and partial failures.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server with the bucket ``lake``."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = next(int(line) for line in server.stdout if line.strip().isdigit())
        url = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/lake", method="PUT")).close()
        yield url
    finally:
        server.kill()
        server.communicate()


def aws_options(url: str) -> dict[str, str]:
    """How the object store at *url* is reached, as sinks of Delta tables are told."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
