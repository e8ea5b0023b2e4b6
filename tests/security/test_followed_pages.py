"""A page that is followed is for those who have its key, and shows records as text; it and ranks are on loopback."""

import base64
import http.client
import json
import os
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from longspan import Layout, World
from longspan.launch.environment import LOOPBACK
from longspan.launch.launch import start_store_server
from longspan.report.follow import Follower, LiveRun, live_page
from longspan.testing import run_ranks
from tests.report.runs import train_row, write_run
from tests.security.test_hostile_pages import BAD_ROWS


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    with Follower(write_run(tmp_path_factory.mktemp("run")), farewell=0.0) as follower:
        yield follower


def ask(follower: Follower, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    port = int(follower.address.split(":")[2].split("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path.replace("KEY", follower.key), headers={"Host": f"127.0.0.1:{port}"} | headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


OTHER_HOSTS = ("evil.example", "127.0.0.1.evil.example:80", "", "[::1]:1", "127.0.0.1@evil:1")
WITHOUT_KEY = ("/", "/data", "/favicon.ico", "/KEYx/", "/x/KEY/", "/../KEY/", "/%00", "/?key=KEY", "/%C3%A9", "*")
FILES = ("/KEY/metrics.jsonl", "/KEY/../metrics.jsonl", "/KEY//etc/passwd", "/KEY/%2e%2e/x")
METHODS = ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "<script>")
REFUSED: list[tuple[str, str, dict[str, str], int]] = [
    *((path, "GET", {}, 403) for path in WITHOUT_KEY),
    *(("/KEY/", "GET", {"Host": host}, 403) for host in OTHER_HOSTS),  # a page that binds its name to this host
    *((path, "GET", {}, 404) for path in FILES),
    *(("/KEY/", method, {}, 501) for method in METHODS),
]


@pytest.mark.parametrize(("path", "method", "headers", "status"), REFUSED)
def test_no_word_of_the_run_is_told(
    follower: Follower, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    found, body, _ = ask(follower, path, method, **headers)
    assert found == status and "qwen3" not in body and follower.key not in body and (status != 501 or not body)


def test_keys_are_long_and_differ(follower: Follower, tmp_path: Path) -> None:
    with Follower(tmp_path) as other:
        assert other.key != follower.key and len(other.key) >= 43
        assert ask(other, f"/{follower.key}/")[0] == 403
    assert ask(follower, "/KEY/", Host="localhost:9000")[0] == 200  # a port that ssh forwards


def test_the_page_may_run_its_own_script_only_and_tells_nobody_its_address(follower: Follower) -> None:
    _, page, headers = ask(follower, "/KEY/")
    policy, script = headers["Content-Security-Policy"], page.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and page.count("<script") == 2  # the other one is JSON
    for words in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
        assert words in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1] and follower.key not in page
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff" and "Python" not in headers["Server"]


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="sockets are read from /proc")
def test_it_listens_on_loopback_only(tmp_path: Path) -> None:
    before = listening_addresses([os.getpid()])
    with Follower(tmp_path):
        after = listening_addresses([os.getpid()])
    assert after and after - before <= LOOPBACKS


def test_hostile_records_make_a_page(follower: Follower, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = [json.dumps(train_row(step)) for step in range(1, 9)]
    files = {
        "run.json": '{"home": [1], "steps": "x", "ranks": {}, "sessions": [["a", null]]}',
        "summary.json": '{"step": 1e300, "steps": "\\u001b[2J", "stopped": "\\u001b[2J"}',
        "plans.jsonl": "[" * 100_000 + "\n",
        "config.toml": "[train]\nsteps = 'x'\n[run]\ncheckpoints = 7\n",
        "run.lock": "\x1b[2J",
    }
    for name, words in files.items():
        (run / name).write_text(words)
    (run / "metrics.jsonl").write_bytes("\n".join([*rows, *BAD_ROWS, ""]).encode("latin-1"))
    live = LiveRun.read(run)
    assert "\x1b" not in live.state_sentence() and len(live_page(live)[1]["sections"]) > 5
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")  # it would be waited for
    assert LiveRun.read(run).step == 0


# ---- sockets of ranks and pages

LISTENS = "0A"
LOOPBACKS = {"0100007F", f"{0:024X}01000000", f"{0:016X}FFFF00000100007F"}  # 127.0.0.1, ::1, ::ffff:127.0.0.1


def sockets_of(pid: int) -> set[str]:
    inodes = set[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:"):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def listening_addresses(pids: Iterable[int]) -> set[str]:
    inodes = set[str]().union(*map(sockets_of, pids))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENS and row[9] in inodes}


def listen_as_rank(rank: int) -> set[str]:
    with World(Layout(2), backend="gloo", timeout=60) as world:
        world.control.gather_objects(rank)
        return listening_addresses([os.getpid()])


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="sockets are read from /proc")
def test_local_ranks_listen_on_loopback_only() -> None:
    before = listening_addresses([os.getpid()])
    store = start_store_server()
    assert store.host == LOOPBACK
    assert listening_addresses([os.getpid()]) & LOOPBACKS
    assert listening_addresses([os.getpid()]) - before <= LOOPBACKS
    addresses = run_ranks(listen_as_rank, 2)
    assert all(addresses), "a rank over gloo listens"
    assert set[str]().union(*addresses) <= LOOPBACKS
