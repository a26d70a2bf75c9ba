"""Local rank processes: start them, join them into a process group, and say clearly what went wrong.

    run_ranks(entry, 2, options)        in the command
        └─ rank 0: entry(options)       in each rank:  with init_ranks() as (rank, world, device): ...
        └─ rank 1: entry(options)

A rank that fails or dies ends the others. A signal to this process is passed on to the ranks, which have some time to
come to an end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofold.process_group import join_process_group

# When a rank raises, its error may be the echo of another rank's sudden death, which is seen within this time.
ECHO_S = 0.5
POLL_S = 0.2
PATIENCE_S = 2.0  # before a person who pressed Ctrl-C is told what is being waited for
END_S = 10.0  # for a rank that has answered to end by itself


class Ranks(NamedTuple):
    """This process among the others."""

    rank: int
    world: int
    device: torch.device


class RankFailed(RuntimeError):
    """A rank raised or died. The message is one line; `trace` is the rank's traceback, if it left one."""

    def __init__(self, rank: int, message: str, trace: str = "") -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank
        self.trace = trace


class Stopped(RuntimeError):
    """The ranks were ended by a signal to this process before they had come to an end by themselves."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


@dataclass
class Grace:
    """Time for the ranks to end by themselves after SIGTERM or Ctrl-C."""

    seconds: float
    signal_number: int | None = None
    """The signal that came, if one did."""


def run_ranks(
    entry: Callable[..., Any], nproc: int, *args: Any, debug: bool = False, grace: Grace | None = None
) -> list[Any]:
    """Run `entry(*args)` on `nproc` new processes of this machine; return what each rank returned.

    `entry` must be at module level, and it and its arguments must pickle. Each process has RANK, WORLD_SIZE,
    LOCAL_RANK and MASTER_* in its environment, as under torchrun. When a rank fails the others are killed and
    `RankFailed` tells the first failure; with `debug` its message ends in the full traceback.

    Ctrl-C kills the ranks and raises KeyboardInterrupt, SIGTERM does so and raises SystemExit. With `grace` the ranks
    get SIGTERM instead, and its seconds to return. A second Ctrl-C, or the end of that time, kills them and
    raises `Stopped`, as does a rank that fails meanwhile.
    """
    if nproc < 1:
        raise ValueError(f"cannot run {nproc} processes: give at least 1")
    # Here and not on rank 0, which would need a port that is free now and still free when it starts.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    job = _Job(grace)
    with job.signals():
        try:
            job.start(entry, args, nproc, store.port)
            job.wait()
        finally:
            job.kill()
    if job.failures:
        raise RankFailed(*job.first_failure().told(debug))
    return [job.results[rank] for rank in range(nproc)]


@dataclass(frozen=True)
class _Failure:
    rank: int
    message: str
    trace: str
    when: float

    def told(self, debug: bool) -> tuple[int, str, str]:
        message = f"{self.message}\n\n{self.trace.rstrip()}" if debug and self.trace else self.message
        return self.rank, message, self.trace


class _Job:
    """The rank processes of one run."""

    def __init__(self, grace: Grace | None) -> None:
        self.results: dict[int, Any] = {}
        self.failures: list[_Failure] = []
        self._grace = grace
        self._processes: list[BaseProcess] = []
        self._pipes: dict[connection.Connection, int] = {}
        self._signals: list[int] = []
        self._deadline = self._tell_at = float("inf")

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Outside the main thread signals go their own way."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = not self._signals
        self._signals.append(number)
        if self._grace is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if first:
            self._grace.signal_number = number
            self._deadline = time.monotonic() + self._grace.seconds
            self._tell_at = time.monotonic() + PATIENCE_S
            # SIGTERM whatever came: the terminal has sent its Ctrl-C to the ranks as well, and a second one ends them.
            for process in self._processes:
                process.terminate()

    def start(self, entry: Callable[..., Any], args: tuple[Any, ...], nproc: int, port: int) -> None:
        context = get_context("spawn")
        call = pickle.dumps((entry, args))  # once: what does not pickle is said before any process starts
        for rank in range(nproc):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(call, _environment(rank, nproc, port), theirs), name=f"rank{rank}", daemon=True
            )
            with _without_interrupts():
                process.start()
            theirs.close()  # only the child may hold this end, so that its death is seen as the end of the file
            self._processes.append(process)
            self._pipes[ours] = rank

    def wait(self) -> None:
        """Until every rank has returned or one has failed; raises `Stopped` when a signal ended them."""
        while self._pipes and not self.failures:
            self._receive(POLL_S)
            self._check_signals()
        echo = time.monotonic() + ECHO_S
        while self.failures and self._pipes and self.first_failure().trace and time.monotonic() < echo:
            self._receive(echo - time.monotonic())
        if self.failures and self._signals:
            raise Stopped(self._signals[0], f"rank {self.first_failure().rank} ended early")

    def first_failure(self) -> _Failure:
        """A rank that died without a word comes before those that raised because of it."""
        return min(self.failures, key=lambda failure: (failure.trace != "", failure.when))

    def _receive(self, timeout: float) -> None:
        for pipe in connection.wait(list(self._pipes), max(0.0, timeout)):
            assert isinstance(pipe, connection.Connection)
            rank = self._pipes.pop(pipe)
            try:
                answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                process = self._processes[rank]
                process.join()
                answer = _Failure(rank, how_it_ended(process.exitcode), "", time.time())
            if isinstance(answer, _Failure):
                self.failures.append(answer)
            else:
                (self.results[rank],) = answer

    def _check_signals(self) -> None:
        if self._grace is None:
            return
        if self._signals.count(signal.SIGINT) > 1:
            raise Stopped(signal.SIGINT, "ended at once by a second Ctrl-C")
        now, allowed = time.monotonic(), f"{self._grace.seconds:g} s"
        if now > self._deadline:
            late = ", ".join(str(rank) for rank in sorted(self._pipes.values()))
            raise Stopped(self._signals[0], f"rank {late} did not end within {allowed} and was killed")
        if now > self._tell_at:
            self._tell_at = float("inf")
            print(f"waiting up to {allowed} for the ranks to end; Ctrl-C ends them at once", file=sys.stderr)

    def kill(self) -> None:
        for process in self._processes:
            if not self.failures and not self._pipes:
                process.join(END_S)
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


@contextlib.contextmanager
def init_ranks(device_type: str | None = None) -> Iterator[Ranks]:
    """Join the process group that the environment describes, and leave it at the end.

    With CUDA (or `device_type="cuda"`) a rank takes GPU number LOCAL_RANK; collectives run on NCCL for
    tensors there and on gloo for those on the host. Otherwise the ranks share this machine's cores evenly.
    """
    device = join_process_group(device_type)
    rank, world = dist.get_rank(), dist.get_world_size()
    if device.type == "cpu":
        torch.set_num_threads(max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", world))))
    # Not in a `finally`: after an error the other ranks may be inside a collective, and leaving the group
    # could wait for them and hide the error. The process is about to end anyway.
    yield Ranks(rank, world, device)
    dist.destroy_process_group()


def usable_cores() -> int:
    """The cores this process may run on, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_nproc(device_type: str) -> int:
    """Every GPU, or two processes on the CPU: the fewest that communicate."""
    return torch.cuda.device_count() if device_type == "cuda" else 2


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        # The store is the launching process's, as under torchrun; torch asks by these names.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _serve(call: bytes, environment: dict[str, str], pipe: connection.Connection) -> None:
    """What each rank process runs: `entry`, with its result or error sent to the launching process."""
    # A rank inside a collective would not come back to Python to raise KeyboardInterrupt, so the signal ends it
    # directly, unless `entry` wants it otherwise.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="zerofold-parent", daemon=True).start()
    os.environ.update(environment)
    if sys.platform == "linux":
        # All ranks are on this machine, whose own name may not resolve to an address gloo can bind to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        entry, args = pickle.loads(call)
        answer = pickle.dumps((entry(*args),))
    except Exception as error:
        answer = pickle.dumps(_Failure(int(environment["RANK"]), one_line(error), traceback.format_exc(), time.time()))
    sys.stdout.flush()
    with contextlib.suppress(BrokenPipeError):  # the launching process is gone
        pipe.send_bytes(answer)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """What starts in here ignores Ctrl-C until it says otherwise: a rank that imports torch would show a traceback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_with_parent() -> None:
    """The launching process was killed: nobody is left to end this one."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def how_it_ended(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"the process ended with exit code {exit_code} and no error"
    name = signal.Signals(-exit_code).name
    if name == "SIGKILL":
        return "the process was killed (SIGKILL), most often for lack of memory: use a smaller model or batch"
    return f"the process was ended by {name}"


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
