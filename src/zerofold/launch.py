"""Local rank processes: start them, join them into a process group, and say clearly what went wrong.

    run_ranks(entry, 2, options)        in the command
        └─ rank 0: entry(options)       in each rank:  with init_ranks() as (rank, world, device): ...
        └─ rank 1: entry(options)

torch's elastic launcher does the starting and the killing. This file adds the part that a person reads: the
first error of the first rank that failed, instead of one traceback per rank and the launcher's own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# A rank that raised waits this long before it ends. If its error was only the echo of another rank's sudden
# death, the launcher has then noticed that death first.
ECHO_S = 0.5


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


def run_ranks(entry: Callable[..., Any], nproc: int, *args: Any, debug: bool = False) -> list[Any]:
    """Run `entry(*args)` on `nproc` new processes of this machine; return what each rank returned.

    `entry` must be at module level, and it and its arguments must pickle. Each process has RANK, WORLD_SIZE,
    LOCAL_RANK and MASTER_* in its environment, as under torchrun. When a rank fails the others are killed and
    `RankFailed` tells the first failure; with `debug` its message ends in the full traceback.
    Ctrl-C kills the ranks and raises KeyboardInterrupt.
    """
    if nproc < 1:
        raise ValueError(f"cannot run {nproc} processes: give at least 1")
    with (
        tempfile.TemporaryDirectory(prefix="zerofold-") as folder,
        _quiet_launcher(),
        _kept_signal_handlers(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # port 0: the store takes a free one
            local_addr="localhost",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            results = elastic_launch(config, _call_entry)(entry, args, folder)
        except ChildFailedError as error:
            raise _first_failure(error, Path(folder), debug) from None
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stopped.sigval) from None
    return [results[rank] for rank in range(nproc)]


@contextlib.contextmanager
def init_ranks(device_type: str | None = None) -> Iterator[Ranks]:
    """Join the process group that the environment describes, and leave it at the end.

    With CUDA (or `device_type="cuda"`) a rank takes GPU number LOCAL_RANK; collectives run on NCCL for
    tensors there and on gloo for those on the host. Otherwise the ranks share this machine's cores evenly.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} not set: start the script with torchrun, or the function with run_ranks"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cpu")
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            raise RuntimeError(f"local rank {local_rank} has no GPU of its own, there are {gpus}: start fewer ranks")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        torch.set_num_threads(max(1, usable_cores() // local_world))
        dist.init_process_group("gloo")
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


def _call_entry(entry: Callable[..., Any], args: tuple[Any, ...], folder: str) -> Any:
    """What each rank process runs: `entry`, with its error put down where the launching process finds it."""
    # Ctrl-C and the death of the launching process both arrive as SIGINT. A rank inside a collective would
    # not come back to Python to raise KeyboardInterrupt, so the signal ends it directly.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        # All ranks are on this machine, whose own name may not resolve to an address gloo can bind to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        return entry(*args)
    except Exception as error:
        report = {"time": time.time(), "message": _one_line(error), "trace": traceback.format_exc()}
        _error_file(Path(folder), int(os.environ["RANK"])).write_text(json.dumps(report))
        time.sleep(ECHO_S)
        raise SystemExit(1) from None


def _first_failure(launcher_error: ChildFailedError, folder: Path, debug: bool) -> RankFailed:
    noticed_rank, process = launcher_error.get_first_failure()
    if not _error_file(folder, noticed_rank).exists():
        return RankFailed(noticed_rank, _how_it_ended(process.exitcode))
    reports = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.error")}
    rank = min(reports, key=lambda rank: reports[rank]["time"])
    message, trace = reports[rank]["message"], reports[rank]["trace"]
    return RankFailed(rank, f"{message}\n\n{trace.rstrip()}" if debug else message, trace)


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.error"


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"the process ended with exit code {exit_code} and no error"
    name = signal.Signals(-exit_code).name
    if name == "SIGKILL":
        return "the process was killed (SIGKILL), most often for lack of memory: use a smaller model or batch"
    return f"the process was ended by {name}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the launcher's own account of a failure, which would bury ours."""
    # Each of its loggers has a level of its own, so there is no one place to set it.
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger)
    ]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextlib.contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """The launcher installs handlers and leaves them; give the caller's back."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in names if hasattr(signal, name)}
    try:
        yield
    finally:
        # Outside the main thread the launcher installs none, and neither can we.
        with contextlib.suppress(ValueError):
            for name, handler in handlers.items():
                signal.signal(getattr(signal, name), handler)
