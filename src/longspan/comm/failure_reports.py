"""What ranks post to their store when a collective fails: who left, what the others do, and the report of it.

Each rank says what it does, and which collective torch's flight recorder has last.

The first rank to notice requests a report, every other rank that lives answers, and all read the one report. Reports
are numbered: a world in which ranks caught an error and went on has a new one at its next failure.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, Store

from longspan.comm.rendezvous import LimitedStore, clone_store_connection
from longspan.launch.launcher_watch import has_ended, processes_of_torchrun
from longspan.launch.rank_process import DEAD_KEY
from longspan.plain_text import excerpt

ANSWER_SECONDS = 5.0  # a report waits this long for answers
NAMED = 6  # ranks named one by one in a message
NAMED_NODES = 8


class Activity(NamedTuple):
    """What a rank is doing: in words, the collective that it is in ("" for none), and what torch recorded last."""

    text: str
    operation: str = ""
    recorded: str = ""


@dataclass(frozen=True)
class FailureReport:
    """Why a collective fails, the most telling first, and what each rank does; every rank reads the same.

    `own_error`: a rank left with an error of its own. `reporter` is the rank that collected the report, and prints all
    of it; −1 where none could, and each rank that failed prints its own.
    """

    causes: tuple[str, ...]
    activities: tuple[str, ...] = ()
    own_error: bool = False
    reporter: int = -1


@dataclass(frozen=True)
class Nodes:
    """The names of all nodes, and the ranks of each, from rank 0's node on."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    def describe_ranks(self, ranks: Sequence[int]) -> str:
        """Name ranks by their nodes.

        >>> Nodes(("node 0", "node 1"), ((0, 1), (2, 3))).describe_ranks([1, 2, 3])
        'rank(s) (1) of node 0 and all ranks (2, 3) of node 1'
        """
        parts = list[str]()
        rank_set = set(ranks)
        for name, node_ranks in zip(self.names, self.ranks, strict=True):
            present = [rank for rank in node_ranks if rank in rank_set]
            if present:
                parts.append(
                    f"{'all ranks' if len(present) == len(node_ranks) else 'rank(s)'} {excerpt(present)} of {name}"
                )
        overflow_note = [f"{len(parts) - NAMED_NODES} more nodes"] if len(parts) > NAMED_NODES else []
        return " and ".join([*parts[:NAMED_NODES], *overflow_note])


def read_nodes(store: Store, prefix: str, size: int) -> Nodes | None:
    """Return the nodes by the names that each rank wrote into the world's store as it came; None for a single node."""
    keys = [f"rank/{rank}" for rank in range(size)]
    names: list[bytes] = PrefixStore(prefix, store).multi_get(keys)  # pyright: ignore[reportAttributeAccessIssue]
    ranks = dict[str, list[int]]()
    for rank, name in enumerate(names):
        ranks.setdefault(name.decode(), []).append(rank)
    if len(ranks) > 1:
        return Nodes(tuple(ranks), tuple(map(tuple, ranks.values())))
    return None


class FailureReports:
    """One rank's side of the reports. `root` is a connection to the store of all ranks, which `server` serves, and
    `prefix` this world's in it.

    Its methods raise RuntimeError where the store does not answer, except for `post_departure`.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], root: Store, prefix: str, server: str = "the launcher"
    ) -> None:
        self._rank = rank
        self._ranks = tuple(ranks)
        self._prefix = prefix
        self.server = server
        self._connect(root)
        self._processes = processes_of_torchrun()  # process ids of ranks on this host
        self.nodes: Nodes | None = None  # where the ranks run, once the world is open
        self._answered = 0  # the last report that this rank answered for
        self._answered_at = -math.inf
        self._answering = threading.Lock()  # the main thread answers too, where its own collective fails

    def open_own_connection(self) -> None:
        """Ask over a new connection from now on: an earlier request may still hold the old one."""
        self._connect(clone_store_connection(self._connection))

    def _connect(self, root: Store) -> None:
        self._connection = root
        self._root = LimitedStore(root)
        self._store = LimitedStore(PrefixStore(self._prefix, root))

    def post_departure(self, error: str, *, echo: bool) -> None:
        """Tell the others that this rank leaves with an error; an `echo` is one that reports another rank's failure."""
        with suppress(RuntimeError):  # the store is gone: the others will notice by themselves
            self._append_entry("left", {"rank": self._rank, "error": error, "echo": echo})

    def has_departure_or_request(self) -> bool:
        """Whether a rank has left with an error or requested a report, so far; one request to the store."""
        return self._store.check(["news"])

    def has_departures(self) -> bool:
        """Whether a rank has left with an error, so far."""
        return self._store.check(["left"])

    def unanswered_request_number(self) -> int:
        """Return the number of a report that this rank has not answered for; 0 if there is none."""
        following = self._answered + 1
        return following if self._store.check([f"{following}/requested"]) else 0

    def post_answer(self, number: int, activity: Activity) -> None:
        """Post what this rank is doing, once for each report."""
        with self._answering:
            if number > self._answered:
                self._append_entry(f"{number}/answers", {"rank": self._rank, **activity._asdict()})
                self._answered = number
                self._answered_at = time.monotonic()

    def request_report(self, activity: Activity, since: float) -> FailureReport:
        """Return the report of a collective that this rank entered at the monotonic time `since`.

        If this rank has answered for a report since then, that report is of the same failure; otherwise the next one is
        requested. The first rank to request a report collects the answers and posts the report; the others wait for it,
        and where it does not come in time, their report says so.
        """
        has_answered_since = self._answered_at >= since
        number = self._answered if has_answered_since else self._answered + 1
        me = str(self._rank)
        requests_it = self._store.compare_set(f"{number}/requested", "", me) == me.encode()
        self.post_answer(number, activity)  # so that all ranks learn of the request
        if requests_it:
            report = self._collect_report(number, activity.operation)
            self._store.set(f"{number}/report", json.dumps(asdict(report)))
            return report
        # the rank that collects waits ANSWER_SECONDS for answers, and then posts within 2 s
        deadline = time.monotonic() + ANSWER_SECONDS + 2
        # a blocking read would hold the connection, which the answering thread shares
        while not self._store.check([f"{number}/report"]):
            if time.monotonic() > deadline:
                return FailureReport(("another rank requested a report, and did not post it",))
            time.sleep(0.05)
        values = json.loads(self._store.get(f"{number}/report"))
        lists = {name: tuple(values.pop(name)) for name in ("causes", "activities")}
        return FailureReport(**lists, **values)

    def has_died(self, rank: int) -> bool:
        """Whether a launcher has posted that a rank died; torchrun and others post nothing."""
        return self._root.check([f"{DEAD_KEY}{rank}"])

    def _collect_report(self, number: int, operation: str) -> FailureReport:
        """Wait at most ANSWER_SECONDS. The causes are ranks that left with an error of their own, died or did not
        answer; if there are none, ranks that are not in this operation. A rank that left only because it heard of a
        failure is no cause."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answers = {entry.pop("rank"): Activity(**entry) for entry in self._entries(f"{number}/answers")}
            departures = {entry["rank"]: entry for entry in self._entries("left")}
            missing = [rank for rank in self._ranks if rank not in answers and rank not in departures]
            deaths = self._death_texts(missing)
            if len(deaths) == len(missing) or time.monotonic() > deadline:  # or nobody is left who may answer
                break
            time.sleep(0.05)
        remaining = {rank: answers[rank] for rank in sorted(answers) if rank not in departures}
        own_errors = [entry for entry in departures.values() if not entry["echo"]]
        causes = [f"rank {entry['rank']} left with {entry['error']}" for entry in own_errors[:NAMED]]
        causes += [f"rank {rank} does not answer: it {deaths[rank]}" for rank in list(deaths)[:NAMED]]
        if silent := [rank for rank in missing if rank not in deaths]:
            ranks_text = f"rank(s) {excerpt(silent)}" if self.nodes is None else self.nodes.describe_ranks(silent)
            causes.append(f"{ranks_text} do not answer: killed, cut off or stopped")
        causes = causes or _outlier_lines(remaining, operation)
        activities = _activity_lines(remaining, operation)
        return FailureReport(tuple(causes), tuple(activities), bool(own_errors), self._rank)

    def server_text(self) -> str:
        """Say that the store does not answer, by who serves it and on which node (rank 0's): the cause in a report."""
        node = (
            "" if self.nodes is None else f" on {self.nodes.names[0]}, with ranks {excerpt(self.nodes.ranks[0])},"
        )
        return f"{self.server}, which serves the store{node or ','} does not answer: killed, cut off or stopped"

    def _death_texts(self, missing: Sequence[int]) -> dict[int, str]:
        """The process id tells it of a rank that torchrun started on this host, a post of its launcher of any rank:
        looked up for the first 64 missing ranks only, as each takes a request."""
        processes = {rank: self._processes[rank] for rank in missing if rank in self._processes}
        deaths = {
            rank: f"ended, or was killed: process {pid} is gone"
            for rank, pid in processes.items()
            if has_ended(pid)
        }
        posted = [rank for rank in missing[:64] if self.has_died(rank)]
        return deaths | {rank: self._root.get(f"{DEAD_KEY}{rank}").decode() for rank in posted}

    def _entries(self, key: str) -> list[dict[str, Any]]:
        """The entries come in the order in which ranks appended them."""
        if not self._store.check([key]):
            return []
        return [json.loads(line) for line in self._store.get(key).decode().splitlines()]

    def _append_entry(self, key: str, entry: dict[str, Any]) -> None:
        self._store.append(key, json.dumps(entry) + "\n")
        self._store.set("news", "")


def _outlier_lines(activities: Mapping[int, Activity], operation: str) -> list[str]:
    """For NAMED ranks at most, and one line that counts the others."""
    texts = [f"rank {rank} is {doing.text}" for rank, doing in activities.items() if doing.operation != operation]
    if not texts:
        return ["all ranks are in it: look at the network and the devices between them"]
    more = len(texts) - NAMED
    if more > 0:
        return [*texts[:NAMED], f"{more} more ranks are not in it either"]
    return texts


def _activity_lines(activities: Mapping[int, Activity], operation: str) -> list[str]:
    """First those that are not in `operation`: NAMED ranks at most, and one line that counts the others."""
    ranks = sorted(activities, key=lambda rank: (activities[rank].operation == operation, rank))
    lines = list[str]()
    for rank in ranks[:NAMED]:
        recorded = activities[rank].recorded
        lines.append(
            f"rank {rank} is {activities[rank].text}" + (f"; torch recorded last: {recorded}" if recorded else "")
        )
    if len(ranks) > NAMED:
        return [*lines, f"{len(ranks) - NAMED} more ranks answer"]
    return lines


_c10d: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
# A recorder answers in this time; next to a device that is stuck it may never answer.
RECORDER_SECONDS = 2.0


def last_collective_text() -> str:
    """Return the first collective that NCCL has not completed, else the last that was started; "" for none.

    torch's flight recorder keeps the last 2,000 of each process (TORCH_FR_BUFFER_SIZE, 0 turns it off; torch 2.11 to
    2.15 have it on). Nothing is raised here: a report without this is a report still. Behind a stuck device a recorder
    may never answer, and then only a thread of its own waits for it.

    >>> last_collective_text()
    'gloo:all_reduce number 4 of the group "control", [8] Float'
    """
    texts = list[str]()

    def read() -> None:
        with suppress(Exception):
            texts.append(_read_last_collective())

    thread = threading.Thread(target=read, name="longspan recorder", daemon=True)
    thread.start()
    thread.join(RECORDER_SECONDS)
    return texts[0] if texts else ""


def _read_last_collective() -> str:
    nccl = _recorded_entries("_dump_nccl_trace_json")
    unfinished = next((entry for entry in nccl if entry["state"] != "completed"), None)
    if unfinished is not None:
        return f"{_collective_text(unfinished)}, {unfinished['state']}"
    last_entries = [*nccl[-1:], *_recorded_entries("_dump_fr_trace_json")[-1:]]
    if not last_entries:
        return ""
    return _collective_text(max(last_entries, key=lambda entry: entry["time_created_ns"]))


def _recorded_entries(function: str) -> list[dict[str, Any]]:
    """Oldest first; none where this torch has no such recorder."""
    dump: Callable[[], bytes] | None = getattr(_c10d, function, None)
    return [] if dump is None else json.loads(dump()).get("entries", [])


def _collective_text(entry: dict[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    sizes = ", ".join(
        f"{size} {kind}" for size, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    )
    return f'{entry["profiling_name"]} number {number} of the group "{entry["process_group"][1]}"' + (
        f", {sizes}" if sizes else ""
    )
