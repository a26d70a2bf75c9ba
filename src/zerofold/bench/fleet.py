"""The rank processes of each engine: started once, idle at a pipe between turns, killed at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import MappingProxyType, TracebackType
from typing import IO, Any, TypeVar

import torch.distributed as dist

from zerofold.bench.gpt import GPTSize
from zerofold.bench.worker import Failure, RankTask, Ready, Turn, TurnResult

MALLOC_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "default": {},
        # Freed memory stays with the process, up to a GiB. glibc takes no mmap threshold above 32 MiB.
        "tuned": {
            "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
            "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
            "MALLOC_TOP_PAD_": str(1 << 30),
        },
    }
)

START_WORKER = "from zerofold.bench.worker import main; main()"

Answer = TypeVar("Answer", Ready, TurnResult)


class EngineError(Exception):
    """An engine could not be built or a rank of it died; the message is what a user should read."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all engines of a run have in common."""

    world: int
    device: str
    """"cpu" or "cuda"."""
    size: GPTSize
    batch: int
    dtype: str = "float32"
    """Of parameters, gradients and states alike; with `mixed`, of what the model computes in."""
    mixed: bool = False
    """The 16-bit engines, whose optimizers work in fp32."""
    checkpointing: bool = False
    """Every block is computed again in backward, for every engine."""
    compiled: bool = False
    """Every block is compiled, for every engine."""
    malloc: str = "default"
    timeout: float = 300.0
    """Seconds that an engine may take to start, or for a turn."""

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"


@dataclass
class _RankProcess:
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: IO[bytes]

    def explain_end(self) -> str:
        """Why the process is gone: its exit and the last line it wrote."""
        code = self.process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1].strip()}" if lines else how


class EngineProcesses:
    """One engine, alive on all its ranks. If a rank goes wrong, all are killed and EngineError is raised."""

    def __init__(self, engine: str, setting: Setting) -> None:
        """Start the processes; `ready` waits for them, so that several engines can start at once."""
        self.engine = engine
        self.timeout = setting.timeout
        # Held here and on a port that the system picks: no rank has to guess a free one.
        self._store = dist.TCPStore("127.0.0.1", 0, setting.world, is_master=True, wait_for_workers=False)
        task = RankTask(
            engine=engine,
            rank=0,
            world=setting.world,
            store_port=self._store.port,
            device=setting.device,
            size=setting.size,
            batch=setting.batch,
            dtype=setting.dtype,
            mixed=setting.mixed,
            checkpointing=setting.checkpointing,
            compiled=setting.compiled,
            timeout=setting.timeout,
        )
        self._ranks: list[_RankProcess] = []
        try:
            for rank in range(setting.world):
                self._ranks.append(_start(replace(task, rank=rank), setting))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> EngineProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def ready(self) -> list[Ready]:
        """Wait until the engine is built on every rank."""
        return self._answers(Ready)

    def turn(self, *, untimed: int, timed: int) -> list[TurnResult]:
        """Run some steps on every rank; results by rank."""
        for rank, member in enumerate(self._ranks):
            try:
                member.pipe.send(Turn(untimed=untimed, timed=timed))
            except BrokenPipeError:
                raise self._failed(f"rank {rank} {member.explain_end()}") from None
        return self._answers(TurnResult)

    def kill(self) -> None:
        """End every rank at once. A rank holds nothing worth a slower goodbye."""
        for member in self._ranks:
            member.process.kill()
        for member in self._ranks:
            member.process.wait()
            member.pipe.close()
            member.log.close()
        self._ranks = []

    def _answers(self, kind: type[Answer]) -> list[Answer]:
        """One answer per rank; the first rank that fails or dies ends the wait, whatever the others do."""
        deadline = time.monotonic() + self.timeout
        answers: dict[int, Answer] = {}
        while len(answers) < len(self._ranks):
            missing = {member.pipe: rank for rank, member in enumerate(self._ranks) if rank not in answers}
            arrived = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not arrived:
                late = ", ".join(str(rank) for rank in missing.values())
                raise self._failed(f"no answer from rank {late} within {self.timeout:.0f} s")
            for pipe in arrived:
                assert isinstance(pipe, Connection)
                rank = missing[pipe]
                try:
                    answer: Any = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise self._failed(f"rank {rank} {self._ranks[rank].explain_end()}") from None
                if isinstance(answer, Failure):
                    raise self._failed(f"rank {rank}: {answer.reason}")
                assert isinstance(answer, kind)
                answers[rank] = answer
        return [answers[rank] for rank in range(len(self._ranks))]

    def _failed(self, reason: str) -> EngineError:
        self.kill()
        return EngineError(reason)


def _start(task: RankTask, setting: Setting) -> _RankProcess:
    environment = {
        # The host's name may not resolve to an address that gloo can bind to.
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        **os.environ,
        **MALLOC_SETTINGS[setting.malloc],
        # What can be imported here can be imported there, installed or not.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        # DeepSpeed reads these, whether or not the process group exists.
        "RANK": str(task.rank),
        "LOCAL_RANK": str(task.rank),
        "WORLD_SIZE": str(task.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.store_port),
        "DS_ACCELERATOR": task.device,
    }
    ours, theirs = Pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
    process = subprocess.Popen(
        [sys.executable, "-c", START_WORKER, str(theirs.fileno())],
        env=environment,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C reaches the driver alone, which then kills the ranks
    )
    theirs.close()  # or the death of the rank would not close the pipe
    ours.send(task)
    return _RankProcess(process, ours, log)
