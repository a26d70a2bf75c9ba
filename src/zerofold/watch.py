"""A thread beside each model that finds out, when a collective takes long, what the other ranks are doing.

It sleeps while calls come and go: the training thread only counts and stores the time of each. When a call has been
unfinished for some seconds, ranks tell each other through the store of torch.distributed, which needs no collective,
what they called last. A rank that is busy elsewhere answers too: its thread does, whatever its main thread is at.

rank 0, waiting   asks, tells its last calls, reads the others'      a mismatch or a ring of waiting ranks: verdict
rank 1, waiting   the same, in turns where there are many ranks      every rank reads it and raises
rank 2, elsewhere sees that somebody asks, tells its last calls

Calls that differ are a fault at once, however slow a rank is; a rank that has not come yet is none until `patience`
is over.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from zerofold.comm import Comm, DivergenceError
from zerofold.divergence import (
    Account,
    Line,
    Seen,
    find_deadlock,
    find_mismatch,
    find_stop,
    who_is_gone,
    who_is_idle,
)
from zerofold.groups import Groups
from zerofold.traffic import Call, Habit

TICK_S = 1.0
LONG_S = 2.0  # an unfinished call is looked into after this long
WARN_AFTER_S = 10.0  # a rank that does not come is worth a line
ANSWER_S = 5.0  # a living rank answers within this, even if it has to notice first that it waits
CONFIRM_S = 10.0  # after which a call that is new in its place is made, unless the ranks are found to differ
_QUIET = 3  # ticks after which a rank that has nothing to complain about looks whether somebody asks
_AT_ONCE = 8  # ranks that read all others' accounts in one tick


class Watch:
    """Watches the groups of one model. `close` ends it; so do the end of torch.distributed and of the process."""

    def __init__(
        self, comms: dict[str, Comm], job: Comm, control: Comm, store: dist.Store, *, patience: float | None
    ) -> None:
        """`job`: all ranks that are watched; `control`: those among them that run the same calls."""
        self._comms, self._control, self._store, self._patience = comms, control, store, patience
        self._traffic = job.traffic
        self._ranks, self._rank = job.global_ranks, job.global_ranks[job.rank]
        self._verdict: str | None = None
        self.has_diverged = False
        self._failed = ""
        self._asked = b""  # as last seen
        self._told = 0  # accounts given
        self._heard: dict[int, tuple[bytes, float]] = {}  # by rank: the last account, and since when it has been there
        self._stalled_since: float | None = None
        self._ticks = self._quiet_ticks = 0  # in this stall, and since the start
        self._warned = False
        self._suspected: str | None = None
        self._confirmed: dict[Comm, str] = {}  # the last mark of each group
        self._ended = threading.Event()
        self._lock = threading.Lock()  # the training thread comes in by `explain`
        self._thread = threading.Thread(target=self._run, name="zerofold watch", daemon=True)
        for name, comm in comms.items():
            comm.watcher = self
            # Reductions have one order by construction, and nothing of theirs could be taken for another.
            comm.habit = Habit() if name not in ("reduce", "across") else None
        self._thread.start()

    @classmethod
    def over(cls, groups: Groups, *, patience: float | None) -> Watch | None:
        """None where there is nobody to wait for, or only a fake one.

        Ranks of other axes of a mesh have groups of their own; all watch each other, for what one calls may be waited
        for along any of them.
        """
        control, job = groups.control, groups.job
        if job.size == 1 or not job.is_gloo:
            return None
        # Groups made by their members alone have the same name every time, so each model gets a name of its own.
        token = job.all_gather_objects(f"{time.time_ns():x}")[0]
        named = {"gather": groups.gather, "reduce": groups.reduce, "everyone": groups.everyone}
        named |= {name: comm for name in ("across", "copy", "model") if (comm := getattr(groups, name)) is not None}
        found: dict[str, Comm] = {}
        for name, comm in {**named, "control": control, "job": job}.items():
            if comm.size > 1 and comm not in found.values():
                found[name] = comm
        return cls(found, job, control, dist.PrefixStore(f"zerofold/{token}", _own_store()), patience=patience)

    def close(self) -> None:
        self._ended.set()
        for comm in self._comms.values():
            comm.watcher = None
        if self._thread is not threading.current_thread():
            self._thread.join(TICK_S)

    def look(self) -> None:
        if self._verdict is not None:
            raise DivergenceError(f"rank {self._rank}: {self._verdict}. Last calls here: {self._traffic.last(6)}")

    def explain(self, cause: str) -> str:
        """Asks the others, for as long as living ranks need to answer."""
        try:
            with self._lock:
                self._failed = cause or "failed"
                before = {rank: raw for rank, raw in self._read_all().items() if rank != self._rank}
                start = time.monotonic()
                while self._verdict is None and time.monotonic() - start < ANSWER_S:
                    self._ask()
                    self._tell()
                    self._read_verdict()
                    raws = self._read_all()
                    answered = {rank for rank, raw in raws.items() if raw != before.get(rank)} | {self._rank}
                    if len(answered) == len(self._ranks):
                        break
                    time.sleep(TICK_S / 4)
                accounts = _parse(self._read_all())
                silent = set(self._ranks) - answered if self._verdict is None else set()
                found = self._verdict or find_mismatch(accounts)
                self.has_diverged = found is not None
                found = found or who_is_gone(accounts, silent) or who_is_idle(accounts)
                if found is not None and self._verdict is None:
                    self._judge(found)
                return f"because {found}" if found else ""
        except RuntimeError:
            return "because the store of torch.distributed is gone with the process that kept it, as a rule rank 0's"

    def compare(self) -> str | None:
        told = self._control.all_gather_objects(self._account().as_dict(), unit="comparison")
        return find_mismatch({account["rank"]: Account.from_dict(account) for account in told})

    def confirm(self, comm: Comm, call: Call) -> None:
        """Every rank counts itself in; a rank that does something else does not come, and is found out meanwhile.

        Not in backward: where ranks have different gradients, another one may need a reduction of this rank first, and
        that they agree has been seen in forward. And not for ever: a rank may be slow.
        """
        if torch._C._current_graph_task_id() != -1:
            return
        mark = f"{self._key(comm)}/{call.position}/{_seen(call, comm)}/{call.nbytes}"
        comm.about, start, pause = call, time.monotonic(), 0.0001
        try:
            count = self._store.add(mark, 1)
            while count < comm.size and time.monotonic() - start < CONFIRM_S:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
                self.look()
                count = self._store.add(mark, 0)
            before = self._confirmed.get(comm)
            if before is not None and comm.rank == 0 and count >= comm.size:
                self._store.delete_key(before)  # everybody has left it behind
        except DivergenceError:
            raise
        except RuntimeError:  # the store has gone with the process that kept it: the call itself will tell
            return
        finally:
            comm.about = None
        self._confirmed[comm] = mark

    def _key(self, comm: Comm) -> str:
        name = next(name for name, other in self._comms.items() if other is comm)
        return f"{name}:{','.join(map(str, comm.global_ranks))}"

    def _run(self) -> None:
        # The store goes when torch.distributed ends, whether or not the model was closed.
        with contextlib.suppress(RuntimeError):
            while not self._ended.wait(TICK_S) and self._verdict is None and dist.is_initialized():
                with self._lock:
                    self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        waiting = self._waiting(now)
        if waiting < LONG_S:
            self._stalled_since, self._ticks, self._warned = None, 0, False
            self._quiet_ticks += 1
            if now - self._traffic.last_started < LONG_S and self._quiet_ticks % _QUIET:
                return  # calls come and go; others may wait for this rank all the same, so it answers now and then
        else:
            self._ask()
        self._read_verdict()
        if self._is_asked():
            self._tell()
        if waiting >= LONG_S and self._verdict is None:
            self._stalled_since = now if self._stalled_since is None else self._stalled_since
            # Where there are many ranks they take turns: all of them reading all would be too much for the store.
            turns = -(-len(self._ranks) // _AT_ONCE)
            if (self._ticks + self._ranks.index(self._rank)) % turns == 0:
                self._diagnose(waiting, now)
            self._ticks += 1

    def _waiting(self, now: float) -> float:
        """Seconds for which the oldest last call of a group has been unfinished."""
        longest = 0.0
        for comm in self._comms.values():
            handle, call = comm.latest, comm.about or comm.blocked
            if call is None and handle is not None and not handle.is_finished():
                call = handle.call
            if call is not None:
                longest = max(longest, now - call.started)
        return longest

    def _diagnose(self, waiting: float, now: float) -> None:
        raws = self._read_all()
        accounts = _parse(raws)
        found = find_mismatch(accounts)
        if found is None:
            # Of a ring, two looks: on a device "not finished" may mean that the host has not come to wait yet.
            ring, before = find_deadlock(accounts), self._suspected
            self._suspected = ring
            found = ring if ring is not None and ring == before else None
        if found is not None and len(accounts) < len(self._ranks) and self._ticks < ANSWER_S / TICK_S:
            return  # true already, but those who have yet to tell belong into the message
        if found is not None:
            self._judge(found)
            return
        assert self._stalled_since is not None
        can_answer = now - self._stalled_since > ANSWER_S
        silent = [rank for rank in self._ranks if can_answer and now - self._heard.get(rank, (b"", 0.0))[1] > ANSWER_S]
        late = waiting >= min(WARN_AFTER_S, (self._patience or WARN_AFTER_S * 2) / 2) and not self._warned
        over = self._patience is not None and waiting >= self._patience
        stop = find_stop(accounts, silent, at_least=waiting - 2 * TICK_S) if late or over else None
        if stop is not None and over:
            self._judge(f"{stop.text}. Waited longer than patience={self._patience:g} seconds")
        elif stop is not None and late:
            self._warned = True
            if stop.first_waiting == self._rank:
                _warn(f"rank {self._rank} waits: {stop.text}")

    def _judge(self, verdict: str) -> None:
        self._store.set("verdict", verdict)
        self._verdict = verdict
        self._abort()

    def _abort(self) -> None:
        for comm in self._comms.values():
            if not comm.is_gloo:  # whose calls nobody can leave: they end when their group does
                backend = comm.group._get_backend(comm.device)
                getattr(backend, "abort", lambda: None)()

    def _read_verdict(self) -> None:
        if self._verdict is None and self._store.check(["verdict"]):
            self._verdict = self._store.get("verdict").decode()
            self._abort()

    def _ask(self) -> None:
        self._store.set("asked", f"{self._rank} {time.time_ns()}")

    def _is_asked(self) -> bool:
        """Whether somebody has asked since this was last looked at."""
        if not self._store.check(["asked"]):
            return False
        before, self._asked = self._asked, self._store.get("asked")
        return self._asked != before

    def _tell(self) -> None:
        self._told += 1
        told = self._account().as_dict()
        self._store.set(str(self._rank), json.dumps([self._told, told]))

    def _read_all(self) -> dict[int, bytes]:
        now = time.monotonic()
        for rank in self._ranks:
            if self._store.check([str(rank)]):
                raw = self._store.get(str(rank))
                if rank not in self._heard or self._heard[rank][0] != raw:
                    self._heard[rank] = raw, now
        return {rank: raw for rank, (raw, _) in self._heard.items()}

    def _account(self) -> Account:
        now = time.monotonic()
        groups, blocked = {}, None
        for comm in self._comms.values():
            about, calls, key = comm.about, _copy(comm.calls), self._key(comm)
            seen = {call.position: _seen(call, comm) for call in calls}
            if about is not None:
                seen[about.position] = _seen(about, comm)
            groups[key] = Line(comm.global_ranks, max(seen, default=0), seen)
            handle, call = comm.latest, about or comm.blocked
            if call is None and not comm.is_gloo and handle is not None and not handle.is_finished():
                call = handle.call  # the device cannot go on without it, and sooner or later the host waits for that
            if call is not None:
                blocked = key, call.position
        last = _copy(self._traffic.calls)[-1:]
        return Account(
            self._rank,
            groups,
            idle=now - self._traffic.last_started,
            waiting=self._waiting(now),
            blocked=blocked,
            where=_where(),
            failed=self._failed,
            last="".join(f"{call.operation} of '{call.unit or 'the root'}'" for call in last),
        )


def _warn(text: str) -> None:
    try:
        warnings.warn(text, stacklevel=2)
    except Warning:  # where warnings are errors, this thread must live on
        print(f"zerofold: {text}", file=sys.stderr)


def _seen(call: Call, comm: Comm) -> Seen:
    root = None if call.root is None else comm.global_ranks[call.root]
    return Seen(call.operation, call.unit, call.nbytes, root)


def _copy(calls: Iterable[Call]) -> list[Call]:
    while True:
        try:
            return list(calls)
        except RuntimeError:  # the training thread has just added one
            continue


def _parse(raws: dict[int, bytes]) -> dict[int, Account]:
    return {rank: Account.from_dict(json.loads(raw)[1]) for rank, raw in raws.items()}


def _own_store() -> dist.Store:
    """The default store by a connection of its own, where it has connections: one that waits keeps all others out."""
    store = dist.distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, dist.TCPStore) and hasattr(store, "clone"):
        return store.clone()
    return store


_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, __file__, threading.__file__))


def _where() -> str:
    """The line of the user's code that the main thread is at."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
