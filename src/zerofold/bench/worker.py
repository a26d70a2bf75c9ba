"""One rank of one engine: a process that waits at a pipe, runs turns when told to, and answers with times.

Started by `fleet` with the number of the file descriptor that is this process's end of the pipe. It ends when
the other end closes, so nothing outlives the driver.
"""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil
import torch
import torch.distributed as dist

from zerofold.bench.engines import ENGINES
from zerofold.bench.gpt import GPT, GPTSize, RandomTokens
from zerofold.bench.mixed_engines import MIXED_ENGINES
from zerofold.memory.host import peak_resident

# torch imports it with the first optimizer: tens of MiB which would look like the engine's own.
LAZY_IMPORTS = ("torch._dynamo",)


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """What this rank is to build; sent once, before anything else."""

    engine: str
    rank: int
    world: int
    store_port: int
    """Port of the rendezvous store, which the driver holds."""
    device: str
    """"cpu" or "cuda"."""
    size: GPTSize
    batch: int
    dtype: str
    mixed: bool
    """The engine is one of MIXED_ENGINES, not of ENGINES."""
    checkpointing: bool
    compiled: bool
    timeout: float


@dataclass(frozen=True)
class Ready:
    start_bytes: int
    """Resident memory with the imports done and the model built, before the engine touched it."""
    device_build_peak_bytes: int | None
    """Highest memory allocated on the accelerator while the engine took the model over, where there is one."""
    note: str


@dataclass(frozen=True)
class Turn:
    """An order: steps to run without and with the clock."""

    untimed: int
    timed: int


@dataclass(frozen=True)
class TurnResult:
    seconds: list[float]
    """One entry per timed step."""
    losses: list[float]
    """One entry per step, untimed ones included."""
    peak_bytes: int
    """Highest resident memory of this process so far."""
    device_peak_bytes: int | None
    """Highest memory allocated on the accelerator since the build, where there is one."""


@dataclass(frozen=True)
class Failure:
    reason: str


class Rank:
    """The engine of this process, and how far in the data it is."""

    def __init__(self, task: RankTask) -> None:
        engine = (MIXED_ENGINES if task.mixed else ENGINES)[task.engine]
        for module in (*LAZY_IMPORTS, *engine.needs):
            importlib.import_module(module)
        torch.set_num_threads(1)
        on_cuda = task.device == "cuda"
        self.device = torch.device("cuda", task.rank) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=dist.TCPStore("127.0.0.1", task.store_port, is_master=False),
            rank=task.rank,
            world_size=task.world,
            timeout=timedelta(seconds=task.timeout),
        )
        torch.manual_seed(0)
        with self.device:
            model = GPT(task.size, checkpointing=task.checkpointing).to(getattr(torch, task.dtype))
        if task.compiled:
            for block in model.blocks:
                block.compile()
        self.data = RandomTokens(task.size, batch=task.batch, rank=task.rank, device=self.device)
        start_bytes = psutil.Process().memory_info().rss
        self._forget_peak()  # drawing the weights in fp32 takes more than they do
        self.step = engine.build(model, batch=task.batch, device=self.device)
        self.ready = Ready(
            start_bytes=start_bytes,
            device_build_peak_bytes=torch.cuda.max_memory_allocated() if on_cuda else None,
            note=engine.note(self.device),
        )
        del model  # an engine may have made another one of it
        self._forget_peak()
        self.steps_done = 0

    def run(self, turn: Turn) -> TurnResult:
        seconds, losses = [], []
        for index in range(turn.untimed + turn.timed):
            tokens, targets = self.data.at(self.steps_done)
            self._meet()
            start = time.perf_counter()
            loss = self.step(tokens, targets)
            self._meet()
            elapsed = time.perf_counter() - start
            if index >= turn.untimed:
                seconds.append(elapsed)
            losses.append(loss.item())
            self.steps_done += 1
        on_cuda = self.device.type == "cuda"
        return TurnResult(
            seconds=seconds,
            losses=losses,
            peak_bytes=peak_resident(),
            device_peak_bytes=torch.cuda.max_memory_allocated() if on_cuda else None,
        )

    def _forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _meet(self) -> None:
        """Wait until every rank's work is done, on the device too."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()


def serve(connection: Connection) -> None:
    """Build the engine, then run turns until the driver closes the pipe."""
    try:
        rank = Rank(connection.recv())
        connection.send(rank.ready)
        while True:
            connection.send(rank.run(connection.recv()))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        connection.send(Failure(f"{type(error).__name__}: {first_line}"))
        raise  # the whole traceback goes to this rank's log


def main() -> None:
    serve(Connection(int(sys.argv[1])))
