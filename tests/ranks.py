"""Rank processes that stay alive between tests.

Starting a process and importing torch costs seconds, a call on a live process costs milliseconds. So each
world size gets its processes and its gloo group once, and every test sends them a function to run:

    def sum_of_ranks():
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        return total.item()

    def test_sum(ranks):
        assert ranks(3, sum_of_ranks) == [3, 3, 3]

The function must be at module level, since it travels by reference. Arguments and results travel by pickle.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy
import torch
import torch.distributed as dist

from zerofold.comm import Comm
from zerofold.engine import Engine
from zerofold.groups import Groups
from zerofold.watch import Watch

# Of transformers what every model imports, and with it accelerate, which looks once for DeepSpeed: tests that put
# something else there have processes of their own.
PRELOADED = [
    "numpy",
    "pytest",
    "safetensors.torch",
    "torch",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "zerofold.engine",
    "zerofold.parallel.pipeline",
    "zerofold.prepare",
]
COLLECTIVE_TIMEOUT_S = 60
START_TIMEOUT_S = 120
# How long the others may take to answer once a rank has failed: they are often stuck in a collective with it.
GRACE_S = 3.0
EXPECTED_ERROR_GRACE_S = 15.0
# Meshes leave their groups behind, since torch remembers meshes and takes an old one for an equal new one. A group has
# three threads or more, of which one polls: 270 take a seventh of a core on every rank. A new world costs a second.
MOST_THREADS = 100


Ended = SimpleQueue[list[dist.ProcessGroup]]


class RankError(AssertionError):
    """A rank raised, died or hung. The message holds what every rank said."""


@dataclass(frozen=True)
class Answer:
    """What one rank said about one call."""

    value: Any = None
    error: str | None = None  # "ValueError: the message", or how the process ended
    details: str = ""  # the traceback
    group_is_gone: bool = False  # the function destroyed the default process group
    threads: int = 0  # of the process, before the call


def raised(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error of `fn` as "TypeName: message".

    For tests of error messages that every rank raises by itself: the ranks live on, so it costs no restart.
    """
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return _describe(error)
    raise AssertionError(f"{fn.__name__} raised nothing")


class RankPool:
    """Worlds by size, made when first needed; the least recently used one goes when there are too many."""

    def __init__(self, keep: int = 3) -> None:
        self._keep = keep
        self._worlds: OrderedDict[int, World] = OrderedDict()

    def __call__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        expect_error: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank and return the values in rank order.

        With `expect_error`, a rank that failed gives "TypeName: message" in place of its value.
        A world in which anything failed is thrown away: its collectives may be half done. So is one with many threads:
        those of groups that were left behind.
        """
        call = _pack(fn, args, kwargs)
        world = self._world(world_size)
        answers = world.run(call, timeout, EXPECTED_ERROR_GRACE_S if expect_error else GRACE_S)
        failed = any(answer.error is not None for answer in answers)
        if failed or any(answer.group_is_gone or answer.threads > MOST_THREADS for answer in answers):
            self._drop(world_size)
        if failed and not expect_error:
            raise RankError(_report(fn, answers))
        return [answer.value if answer.error is None else answer.error for answer in answers]

    def process_ids(self, world_size: int) -> list[int]:
        """The processes behind a world, for tests of the pool. Empty where no such world is alive."""
        world = self._worlds.get(world_size)
        return world.process_ids() if world else []

    def close(self) -> None:
        for world_size in list(self._worlds):
            self._drop(world_size)

    def _world(self, world_size: int) -> World:
        world = self._worlds.get(world_size)
        if world is not None and not world.is_alive():
            self._drop(world_size)
            world = None
        if world is None:
            while len(self._worlds) >= self._keep:
                self._drop(next(iter(self._worlds)))
            world = self._worlds[world_size] = World(world_size)
        self._worlds.move_to_end(world_size)
        return world

    def _drop(self, world_size: int) -> None:
        self._worlds.pop(world_size).kill()


class World:
    """The processes of one world size, seen from the test process."""

    def __init__(self, world_size: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        # Not a file: whoever waits for a key there looks every 10 ms, three times and more for every model.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Ranks are forked from a process that has imported everything and done nothing: a tenth of a second each.
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, self._store.port, str(self._folder), theirs),
                name=f"rank{rank}",
                daemon=True,
            )
            process.start()
            # Only the child may hold this end: its death is then seen here as end of file.
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        answers = self._collect(START_TIMEOUT_S, GRACE_S)
        if any(answer.error is not None for answer in answers):
            self.kill()
            raise RankError(_report(_serve, answers))

    def run(self, call: bytes, timeout: float, grace: float) -> list[Answer]:
        for pipe in self._pipes:
            # A broken pipe is a dead rank, which `_collect` reports with its exit code.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(call)
        return self._collect(timeout, grace)

    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, timeout: float, grace: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        failed = False
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                assert isinstance(pipe, connection.Connection)
                rank = waiting.pop(pipe)
                answers[rank] = self._receive(rank, pipe)
                if answers[rank].error is not None and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + grace)
        why = "still running when another rank had failed" if failed else f"no answer within {timeout:g} s"
        for rank, stack in self._stacks(list(waiting.values())).items():
            answers[rank] = Answer(error=f"TimeoutError: {why}", details=f"It was here:\n{stack}")
        return [answers[rank] for rank in range(len(self._pipes))]

    def _receive(self, rank: int, pipe: connection.Connection) -> Answer:
        try:
            answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(5)
            return Answer(error=f"ProcessDied: the rank's process ended with exit code {process.exitcode}")
        assert isinstance(answer, Answer)
        return answer

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where the ranks hang, by their own account."""
        if not ranks or not hasattr(signal, "SIGUSR1"):
            return dict.fromkeys(ranks, "")
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        files = {rank: _stack_file(self._folder, rank) for rank in ranks}
        return {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}


def _serve(rank: int, world_size: int, store_port: int, folder: str, pipe: connection.Connection) -> None:
    """The life of a rank process: join the group, then run calls until the other end closes."""
    gc.freeze()  # what was imported before the fork
    # Ctrl-C reaches the whole terminal; the test process decides what happens to the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # The name of the host may not resolve to an address that gloo can bind to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    stack_file = _stack_file(Path(folder), rank).open("w")
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    )
    ended: Ended = SimpleQueue()
    threading.Thread(target=_drop, args=(ended,), name="ended groups", daemon=True).start()
    pipe.send_bytes(pickle.dumps(Answer()))
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_answer(call, ended))


def _drop(ended: Ended) -> None:
    """Gloo's thread of a group sees only every 10 ms that its group has gone: nothing that a test should wait for."""
    while True:
        ended.get()


def _answer(call: bytes, ended: Ended) -> bytes:
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
    _reset()
    try:
        fn, args, kwargs = pickle.loads(call)
        value = fn(*args, **kwargs)
        del args, kwargs
        packed = pickle.dumps(Answer(value=value, group_is_gone=not dist.is_initialized(), threads=threads))
        del value
    except Exception as error:
        packed = pickle.dumps(Answer(error=_describe(error), details=traceback.format_exc()))
    # Models hold cycles with their hooks, and hooks hold groups and buffers: free them before the next test. What is
    # left are modules, and looking through all of transformers after every test would take longer than most tests.
    gc.collect()
    ended.put(_end_groups())
    gc.freeze()
    return packed


def _end_groups() -> list[dist.ProcessGroup]:
    """Those of models that a test did not close: autograd's hooks keep such a model alive, every gloo group of it has a
    thread that polls, and after hundreds of tests they would take a core.
    """
    if not dist.is_initialized():
        return []
    left: list[dist.ProcessGroup | None] = []
    for thing in gc.get_objects():  # since the last freeze
        if type(thing) is Watch:
            thing.close()
        elif type(thing) is Groups:
            left += [*thing.made, thing.control.group]
            object.__setattr__(thing, "made", ())
        elif type(thing) is Engine:
            left.append(thing.saving_group)
            thing.saving_group = None
        elif type(thing) is Comm and thing.group is not dist.group.WORLD:
            left.append(thing.group)
            thing.group = None  # type: ignore[assignment]
    names = dist.distributed_c10d._world.pg_names
    ended = [group for group in set(left) if group is not None]
    for group in ended:
        # One that its members made alone is named after them: made anew, it would find the old one's addresses.
        if names.get(group, "").isdigit():
            dist.destroy_process_group(group)
    return ended


def _reset() -> None:
    """What a test may have changed in the process, back to what the next one expects."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    # Plain pickle, not the pipe's own: that one moves tensors into shared memory, which dies with its owner.
    try:
        return pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"{name} and its arguments must pickle: use a function at module level, "
            f"not a lambda or a nested one ({error})"
        ) from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack{rank}.txt"


def _report(fn: Callable[..., Any], answers: list[Answer]) -> str:
    failures = sum(answer.error is not None for answer in answers)
    lines = [f"{getattr(fn, '__name__', fn)} failed on {failures} of {len(answers)} ranks"]
    for rank, answer in enumerate(answers):
        lines.append(f"--- rank {rank}: {answer.error or 'returned'}")
        if answer.details:
            lines.append(answer.details.rstrip())
    return "\n".join(lines)
