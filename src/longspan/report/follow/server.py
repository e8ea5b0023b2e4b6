"""The server of a page of one run: on 127.0.0.1, for those who know its address, of the standard library only.

The address holds a key of 32 random bytes, and every other path is refused with 403. It reads, sends what it made
itself, and takes nothing: no file of the run's folder is sent, and there is nothing to post. It is no server for a
network: to see the page on another machine, forward the port over ssh.
"""

import errno
import gzip
import json
import secrets
import time
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qsl

from longspan.errors import ConfigError
from longspan.report.follow.live_page import live_page, live_parts, live_title
from longspan.report.follow.live_run import LiveRecords, LiveRun

HOST = "127.0.0.1"
HOSTS = {HOST, "localhost"}  # that a browser may ask by; another name is of a web page, made to lead here
KEY_BYTES = 32
IDLE_SECONDS = 10.0  # of a connection, after which it is closed
POLL_SECONDS = 0.5  # between two looks at the run
ASKS_WITHIN = 6.0  # seconds: a page that is open and seen asks every two
FAREWELL_SECONDS = 3.0  # in which every page that is open fetches the end
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _content_security_policy(nonce: str) -> str:
    """Return what the page allows a browser: to run the script that carries `nonce`, and to ask this server only."""
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'nonce-{nonce}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Follower:
    """Serves the page of a run's folder while it is open; `wait` returns when the run has ended.

    >>> with Follower(Path("runs/first"), port=8765) as follower:
    ...     print(follower.address)             # http://127.0.0.1:8765/KEY/
    ...     print(follower.wait().state_sentence())  # the run has come to its end at step 300 of 300

    Port 0 is any free one. Raises ConfigError where a port cannot be listened on. The folder need not be there yet.
    """

    def __init__(self, run_dir: Path, port: int = 0, *, farewell: float = FAREWELL_SECONDS) -> None:
        """Take the port and draw the key of the address.

        For `farewell` seconds after the end open pages can still fetch the last state.
        """
        self.records: LiveRecords = LiveRecords(run_dir)
        self.key: str = secrets.token_urlsafe(KEY_BYTES)
        self.asked_at: float = -ASKS_WITHIN  # when a page asked last; at first so long ago that none is open
        self.is_over: bool = False
        self._farewell = farewell
        try:
            self._server = _Server((HOST, port), self)
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror})"
            raise ConfigError(f"--port {port} of {HOST} {reason}; give another, or none for a free one") from error
        self.address: str = f"http://{HOST}:{self._server.server_address[1]}/{self.key}/"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    def __enter__(self) -> "Follower":
        """Begin to answer, in a thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop answering, and give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(self) -> LiveRun:
        """Wait until the run has ended and open pages had time to fetch its end; return the run.

        A run that has not begun, or that is about to be resumed, is waited for. Without an open page, which would have
        asked a moment ago, the last wait is left out.
        """
        live, has_begun = self.records.read(), False
        while not is_over(live, has_begun=has_begun):
            has_begun |= live.state == "running"
            time.sleep(POLL_SECONDS)
            live = self.records.read()
        self.is_over = True
        if time.monotonic() - self.asked_at < ASKS_WITHIN:
            time.sleep(self._farewell)
        return live


def is_over(live: LiveRun, *, has_begun: bool) -> bool:
    """Return whether nothing is left to follow: the run is done, or was seen at work (`has_begun`) and is no more.

    One that stopped before it was followed may be about to be resumed.
    """
    return live.state == "done" or (has_begun and live.state != "running")


class _Server(ThreadingHTTPServer):
    """Answers each request in a thread; threads of browsers that stay connected do not hold up the end."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], follower: Follower) -> None:
        self.follower = follower
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of the page and of its parts."""

    server: Any  # a _Server
    server_version, sys_version = "longspan", ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer with the page, or with those of its parts that changed; refuse a request without the key."""
        follower: Follower = self.server.follower
        path, _, query = self.path.partition("?")
        key, _, name = path.removeprefix("/").partition("/")
        if not self._may_ask(key, follower):
            return self._send_text(
                403, "text/plain", "the address has no valid key; use the one that longspan printed\n"
            )
        if name not in ("", "parts"):
            return self._send_text(404, "text/plain", "there is no such page\n")
        live = follower.records.read()
        follower.asked_at = time.monotonic()
        if name == "":
            nonce = secrets.token_urlsafe(16)
            return self._send_text(200, "text/html", live_page(live, nonce=nonce), nonce)
        changes = _changes(live, dict(parse_qsl(query)), over=follower.is_over)
        return self._send_text(200, "application/json", json.dumps(changes))

    def _may_ask(self, key: str, follower: Follower) -> bool:
        """Return whether the key is right, compared in constant time, and the browser asked for this machine."""
        host = str(self.headers.get("Host", "")).rpartition(":")[0] or self.headers.get("Host", "")
        return secrets.compare_digest(key.encode(), follower.key.encode()) and host in HOSTS

    def _send_text(self, status: int, kind: str, words: str, nonce: str = "") -> None:
        """`nonce` is that of a page's script; "" for an answer without a script, which may then load nothing."""
        body = words.encode("utf-8", "replace")
        compressed = len(body) > 1024 and "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(body, 1) if compressed else body
        self.send_response(status)
        headers = _HEADERS | {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        headers |= {"Content-Security-Policy": _content_security_policy(nonce) if nonce else "default-src 'none'"}
        headers |= {"Content-Encoding": "gzip"} if compressed else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is no GET, or is broken, by its status alone: nothing of the request is repeated."""
        self.close_connection = True
        self.send_response(code, "refused")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address is a secret, and requests come every two seconds."""


def _changes(live: LiveRun, shown_hashes: dict[str, str], *, over: bool) -> dict[str, Any]:
    """`shown_hashes` has, by name, the hash of each part that the page shows."""
    changed = dict[str, tuple[str, str]]()
    for name, markup in live_parts(live).items():
        part_hash = blake2b(markup.encode("utf-8", "replace"), digest_size=8).hexdigest()
        if shown_hashes.get(name) != part_hash:
            changed[name] = part_hash, markup
    return {"title": live_title(live), "over": over, "changed": changed}
