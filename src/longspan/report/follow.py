"""A run that is followed while it trains: a server of its page on 127.0.0.1, of the standard library only.

The address holds a key of 32 random bytes, and every other path is refused with 403. The server sends the page and
newer values of it, and no file. To see the page on another machine, forward the port over ssh.
"""

import errno
import gzip
import json
import math
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal

import numpy as np

from longspan.errors import ConfigError
from longspan.files import json_safe_values
from longspan.plain_text import seconds_text
from longspan.report.page import Part, content_policy, finite_values, page, page_head, section
from longspan.report.run_folder import RunFolder, number_to_draw
from longspan.report.run_page import BAD_RECORD, RECENT, RUN_SECTIONS, model_and_data_text, session_text
from longspan.run.facts import LOCK

State = Literal["waiting", "running", "done", "stopped", "broken"]


@dataclass(frozen=True)
class LiveRun:
    """A run now: its records, the process at work ("": none), and the seconds since it wrote metrics, or began."""

    run: RunFolder
    state: State
    holder: str = ""
    idle_seconds: float = 0.0

    @classmethod
    def read(cls, path: Path) -> "LiveRun":
        """Read the run in a folder, which need not be there yet."""
        holder = lock_holder_text(path)  # first: what a run that ends writes is there once its lock is gone
        run = RunFolder.read(path, live=True)
        files = (path / name for name in ("metrics.jsonl", "run.json"))
        idle_seconds = min((time.time() - file.stat().st_mtime for file in files if file.is_file()), default=0.0)
        return cls(run, _state_of(run, holder), holder, idle_seconds)

    @property
    def step(self) -> int:
        return int(self.run.step[-1]) if len(self.run.step) else 0

    @property
    def steps(self) -> int:
        """How many steps the run is to take, by run.json, summary.json or config.toml; 0 where none of them says."""
        facts = self.run.facts
        summary = self.run.summary
        values = facts.steps if facts else 0, summary.get("steps"), self.run.configured_value("train", "steps")
        # up to 2^53 a browser holds whole numbers exactly
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 1 << 53), 0)

    def state_sentence(self) -> str:
        """Where the run is, or what came of it, in a sentence without a full stop."""
        step_text = f"step {self.step:,}" + (f" of {self.steps:,}" if self.steps else "")
        signal = str(self.run.summary.get("stopped"))
        signal = signal if signal.isalnum() and len(signal) < 16 else "a signal"  # a damaged file may hold anything
        sentences: dict[State, str] = {
            "running": f"the run is at {step_text}",
            "waiting": "no run has begun here",
            "done": f"the run has come to its end at {step_text}",
            "stopped": f"the run was stopped by {signal} after {step_text}; the same command goes on",
            "broken": f"the run ended after {step_text} with an error or was killed; its own output says more",
        }
        return sentences[self.state]


def lock_holder_text(folder: Path) -> str:
    """Return which process is at work in a run's folder, as its lock names it; "" where none is. The lock is only asked
    for and never taken, so that a run which begins meanwhile is not refused. Where the system has no locks of files,
    the lock counts as held if the file names a process.
    """
    path = folder / LOCK
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            holder = file.read(4096).decode("utf-8", "replace").strip()
            file.seek(0)
            try:
                os.lockf(file.fileno(), os.F_TEST, 0)
            except (PermissionError, BlockingIOError):
                return holder or "another process"
            except OSError:
                return holder
            return ""
    except OSError:
        return ""


def _state_of(run: RunFolder, holder: str) -> State:
    """The summary counts only if it is of the last step: a resumed run leaves an older one until it ends. A run whose
    summary is missing, or does not give its step, ended with an error. `holder` is the process at work, "" for none."""
    if holder:
        return "running"
    if not run.summary and not len(run.step) and not run.evaluations:
        return "waiting"
    summary_step = number_to_draw(run.summary.get("step"))
    steps = number_to_draw(run.summary.get("steps"))
    last_step = int(run.step[-1]) if len(run.step) else summary_step
    if math.isnan(summary_step) or summary_step != last_step:
        return "broken"
    if run.summary.get("stopped"):
        return "stopped"
    if run.summary.get("end_reason"):
        return "done"
    return "done" if summary_step >= steps else "broken"  # also where `steps` is NaN, as it is not given


HOST = "127.0.0.1"
# A browser may ask by these names; another name is that of a web page, made to lead here.
HOSTS = {HOST, "localhost"}
KEY_BYTES = 32
# A connection is closed after this time without a request.
IDLE_SECONDS = 10.0
# This time passes between two looks at the run.
POLL_SECONDS = 0.5
# Reading a run takes at most this share of the time of a core.
BUSY_SHARE = 0.05
ASKS_WITHIN = 6.0  # seconds: a page that is open and seen asks every two
# Every page that is open fetches the end in this time.
FAREWELL_SECONDS = 3.0
STALLED = 10  # times the median step, and half a minute at least, after which a step counts as late
_WORDS = {"waiting": "waits", "running": "trains", "done": "done", "stopped": "stopped", "broken": "ended"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


# ---- the page


def live_page(live: LiveRun) -> tuple[str, dict[str, Any]]:
    """Return the title and the value of the page of a run now; a section whose records cannot be shown says so."""
    run = live.run
    state = (live.state, _WORDS[live.state])
    sections = list[Part]()
    with np.errstate(all="ignore"):
        for make in RUN_SECTIONS:
            try:
                sections += make(run)
            except BAD_RECORD as error:
                name = make.__name__.replace("_", " ")
                words = f"{name}: records hold values that no run writes ({type(error).__name__}: {error})"
                sections.append(section("", {"note": words[:500]}, key=name))
        story = " · ".join(_progress_texts(live))
    holder = f"at work: {live.holder}" if live.holder else ""
    lines = session_text(run), model_and_data_text(run), run.best_text(), holder
    title = page_head(run.name, *lines, story=story, state=state, progress=(live.step, live.steps))
    steps = f"{live.step:,}/{live.steps:,}" if live.steps else f"{live.step:,}"
    return f"{steps} {state[1]} · {run.name} · longspan", {"head": title, "sections": sections}


def _progress_texts(live: LiveRun) -> Iterator[str]:
    if live.state != "running":
        yield live.state_sentence()
        if live.state == "waiting":
            yield "this page shows one that begins"
        elif live.state in ("done", "stopped"):
            yield "its report is report.html in its folder"
        return
    total = f" of {live.steps:,}" if live.steps else ""
    yield f"step {live.step:,}{total}" if live.step else f"sets up, before step 1{total}"
    seconds = finite_values(live.run.train["seconds"])
    usual_seconds = float(np.median(seconds[-RECENT:])) if len(seconds) else 0.0
    if usual_seconds > 0:
        if live.steps > live.step:
            yield f"about {seconds_text(usual_seconds * (live.steps - live.step))} of steps left"
        if live.idle_seconds > max(30.0, STALLED * usual_seconds):
            yield f"no step for {seconds_text(live.idle_seconds)}, where one takes {seconds_text(usual_seconds)}"


# ---- the server


class Follower:
    """Serves the page of a run's folder while it is open; `wait_until_run_ends` returns when the run has ended.

    >>> with Follower(Path("runs/first"), port=8765) as follower:  # doctest: +SKIP
    ...     print(follower.address)             # http://127.0.0.1:8765/KEY/
    ...     print(follower.wait_until_run_ends().state_sentence())  # the run has come to its end at step 300 of 300

    Port 0 is any free one. Raises ConfigError where a port cannot be listened on. The folder need not be there yet.
    """

    def __init__(self, run_dir: Path, port: int = 0, *, farewell: float = FAREWELL_SECONDS) -> None:
        self.key: str = secrets.token_urlsafe(KEY_BYTES)
        self.asked_at: float = -ASKS_WITHIN  # when a page asked last; at first so long ago that none is open
        self.is_over: bool = False
        self._farewell = farewell
        self._run_dir = run_dir
        self._lock = Lock()
        # This is the run as it was read last.
        self._live: LiveRun | None = None
        self._due = 0.0  # when it is read again
        try:
            self._server: Any = ThreadingHTTPServer((HOST, port), _Handler)
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror})"
            raise ConfigError(f"--port {port} of {HOST} {reason}; give another, or none for a free one") from error
        self._server.follower = self
        self._server.block_on_close = False  # browsers that stay do not hold up the end
        self._server.handle_error = lambda *_: None  # a browser that has gone away is no error of ours
        self.address: str = f"http://{HOST}:{self._server.server_address[1]}/{self.key}/"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def read_run(self) -> LiveRun:
        """Return the run as it is now, or as it was read a moment ago: the longer reading takes, the rarer it is."""
        with self._lock:
            began = time.monotonic()
            if self._live is None or began >= self._due:
                self._live = LiveRun.read(self._run_dir)
                now = time.monotonic()
                self._due = now + max(POLL_SECONDS, (now - began) / BUSY_SHARE)
            return self._live

    def wait_until_run_ends(self) -> LiveRun:
        """Wait until the run has ended, and open pages, which ask often, had time to fetch its end; return the run. A
        run that has not begun, or that is about to be resumed, is waited for.
        """
        live = self.read_run()
        has_begun = False
        while not is_run_over(live, has_begun=has_begun):
            has_begun |= live.state == "running"
            time.sleep(POLL_SECONDS)
            live = self.read_run()
        self.is_over = True
        if time.monotonic() - self.asked_at < ASKS_WITHIN:
            time.sleep(self._farewell)
        return live


def is_run_over(live: LiveRun, *, has_begun: bool) -> bool:
    """Whether the run is done, or was seen at work (`has_begun`) and no longer is; one that stopped earlier may be
    resumed.
    """
    return live.state == "done" or (has_begun and live.state != "running")


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of browsers: the page at /KEY/, its newer values at /KEY/data; all else is refused."""

    # The server's `follower` is the one that made it.
    server: Any
    server_version = "longspan"
    sys_version = ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Send the page, or its values; 204 where the page has them already (data?MARK)."""
        follower: Follower = self.server.follower
        path, _, shown_mark = self.path.partition("?")
        key, _, name = path.removeprefix("/").partition("/")
        host = str(self.headers.get("Host", "")).rpartition(":")[0] or self.headers.get("Host", "")
        if not secrets.compare_digest(key.encode(), follower.key.encode()) or host not in HOSTS:
            words = "the address has no valid key; use the one that longspan printed\n"
            return self._send_text(403, "text/plain", words)
        if name not in ("", "data"):
            return self._send_text(404, "text/plain", "there is no such page\n")
        follower.asked_at = time.monotonic()
        over = follower.is_over
        title, value = live_page(follower.read_run())
        if name == "":
            return self._send_text(200, "text/html", page(title, value, live=True))
        answer = json.dumps(
            json_safe_values({"over": over, "page": {"name": title, **value}}), separators=(",", ":")
        )
        mark = blake2b(answer.encode(), digest_size=8).hexdigest()
        if mark == shown_mark:
            return self._send_text(204, "application/json", "")
        return self._send_text(200, "application/json", f'{{"mark":"{mark}",{answer.removeprefix("{")}')

    def _send_text(self, status: int, kind: str, words: str) -> None:
        """The policy lets only a page load anything in a browser."""
        body = words.encode("utf-8", "replace")
        compressed = len(body) > 1024 and "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(body, 1) if compressed else body
        policy = (
            f"{content_policy(live=True)}; frame-ancestors 'none'" if kind == "text/html" else "default-src 'none'"
        )
        headers = _HEADERS | {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        headers |= {"Content-Security-Policy": policy} | ({"Content-Encoding": "gzip"} if compressed else {})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is no GET, or is broken: nothing of it is repeated."""
        self.close_connection = True
        self.send_response(code, "refused")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address is a secret, and requests come every two seconds."""
