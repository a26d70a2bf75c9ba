"""The agent of one host: it starts the ranks there with torch's elastic agent, and ends with the terminal that asked.

terminal ── stdin ──►  first line: a port to try; second line: the plan; then "stop SIGNAL", "kill"; its end means stop
terminal ◄─ stdout ──  hello, lines, live, failed, refused, done: see plan.py
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn, TextIO

import psutil
import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zerofold.launch import usable_cores
from zerofold.launcher.network import is_free, own_addresses, way_to
from zerofold.launcher.plan import HostPlan, pack
from zerofold.launcher.relay import Relay
from zerofold.launcher.watch import Watch

ENTRY = Path(__file__).with_name("entry.py")
PR_SET_CHILD_SUBREAPER = 36
# A rank inside a collective does not come back to Python to raise KeyboardInterrupt: SIGTERM follows, this long before
# the end of the grace. It never follows a SIGTERM: many scripts take a second one as an order to leave at once.
TERMINATE_S = 2.0
POLL_S = 0.1


class Refused(RuntimeError):
    """The plan does not fit this host; the message is one line for the user."""


class Channel:
    """The two streams to the terminal, kept from the ranks and from everything that prints."""

    def __init__(self) -> None:
        self._orders: TextIO = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def order(self) -> str:
        """The next line; empty when the terminal is gone."""
        return self._orders.readline().strip()

    def send(self, kind: str, **content: Any) -> None:
        # The terminal may be gone: then the end of the orders stops the ranks.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._answers.write(pack(kind, **content))
            self._answers.flush()


def main(gpus: int | None = None) -> int:
    """The exit code. `gpus` is their number where it is known: a copy of a process cannot always ask again."""
    gpus = torch.cuda.device_count() if gpus is None else gpus
    channel = Channel()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    request = channel.order()
    if not request:
        return 1
    port = json.loads(request)["port"]
    channel.send(
        "hello",
        time=time.time(),
        gpus=gpus,
        cores=usable_cores(),
        addresses=own_addresses(),
        port_free=port == 0 or is_free(port),
    )
    order = channel.order()
    if not order.startswith("{"):  # stopped before it began
        return 1
    plan = HostPlan.from_json(order)
    folder = Path(tempfile.mkdtemp(prefix="zerofold-launch-"))
    try:
        return _run(plan, gpus, folder, channel)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(plan: HostPlan, gpus: int, folder: Path, channel: Channel) -> int:
    try:
        os.chdir(plan.folder)
        os.environ.pop("TORCH_CPP_LOG_LEVEL", None)  # was meant for this process; that of the user's is in the plan
        os.environ.update(plan.environment)
        options = _prepare(plan, gpus)
    except (Refused, OSError) as error:
        channel.send("refused", message=str(error))
        return 1
    watch = Watch(plan.grace)
    relay = Relay(folder, len(plan.slots), channel.send, watch)
    threading.Thread(target=_obey, args=(plan, folder, channel), name="zerofold-orders", daemon=True).start()
    task = plan.task
    command = ["-u", "-X", "faulthandler", str(ENTRY), json.dumps(options), task.target, *task.arguments]
    kind = "done"
    content: dict[str, Any] = {}
    try:
        elastic_launch(_config(plan, relay), sys.executable)(*command)
    except ChildFailedError as error:
        kind = "failed"
        content = {"failures": [_record(rank, failure, watch) for rank, failure in error.failures.items()]}
    except (SignalException, SystemExit):
        kind = "stopped"
    except Exception as error:
        kind, content = "refused", {"message": f"torch's elastic agent failed: {type(error).__name__}: {error}"}
    if kind != "done":
        _kill_the_rest()
    relay.finish()
    channel.send(kind, **content)
    return 0 if kind == "done" else 1


def _prepare(plan: HostPlan, gpus: int) -> dict[str, Any]:
    """The environment of the ranks, and what entry.py is told."""
    if sys.platform == "linux":
        # What a rank started and left behind becomes a child of this process, so that it can be found and ended.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    logging.disable(logging.ERROR)  # what matters of it is said by the terminal, once and in order
    environment, ranks = os.environ, len(plan.slots)
    # From torch 2.12 on; before, its agent kills them after 30 s even where the grace is longer.
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(1, round(plan.grace)))
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices(plan.slots, gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    cores = _cores(plan.task.cores)
    if plan.task.bind and len(cores) < ranks:
        raise Refused(f"{ranks} ranks cannot be bound to {len(cores)} cores: start fewer ranks, or leave binding out")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    _set_interfaces(plan)
    if plan.task.as_deepspeed:
        from zerofold.compat.deepspeed import stand_in_folder  # which takes its time, and few ask for it

        stand_in = stand_in_folder()
        paths = [str(stand_in), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return {
        "kind": plan.task.kind,
        "bind": plan.task.bind,
        "cores": cores,
        "local_rank_argument": plan.task.local_rank_argument,
    }


def visible_devices(slots: list[int], gpus: int, shown: str | None) -> str:
    """Slots count among the GPUs that are shown already, by the user or by Slurm.

    >>> visible_devices([0, 2], 4, None), visible_devices([1], 2, "6,7")
    ('0,2', '7')
    """
    missing = [slot for slot in slots if slot >= gpus]
    if missing:
        raise Refused(f"there is no GPU {missing[0]}, there are {gpus}: use slots 0 to {gpus - 1}")
    names = shown.split(",") if shown else [str(gpu) for gpu in range(gpus)]
    return ",".join(names[slot].strip() for slot in slots)


def _cores(wanted: list[int]) -> list[int]:
    """The cores to share out, the two threads of one core and the cores of one socket side by side."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = os.sched_getaffinity(0)
    strangers = sorted(set(wanted) - usable)
    if strangers:
        raise Refused(f"core {strangers[0]} cannot be used here: the usable ones are {sorted(usable)}")
    return sorted(wanted or usable, key=lambda core: (*_place(core), core))


def _place(core: int) -> tuple[int, int]:
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, core


def _set_interfaces(plan: HostPlan) -> None:
    """gloo and NCCL take the address that the host's own name stands for, which other hosts often cannot reach."""
    if plan.nodes > 1:
        way = way_to(plan.master_addr)
        if way is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", way.interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", way.interface)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _config(plan: HostPlan, relay: Relay) -> LaunchConfig:
    # Ranks in the order of the hosts need the fixed meeting point; starting again together needs the one that hosts
    # can leave and join.
    flexible = plan.master_port == 0 or plan.max_restarts > 0
    if plan.max_restarts > 0:
        # Else the ranks of the next attempt would find the addresses of those of the last one.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    way = way_to(plan.master_addr) if plan.nodes > 1 else None
    return LaunchConfig(
        min_nodes=plan.nodes,
        max_nodes=plan.nodes,
        nproc_per_node=len(plan.slots),
        run_id=plan.run_id,
        role="zerofold",
        rdzv_backend="c10d" if flexible else "static",
        rdzv_endpoint=f"{plan.master_addr}:{plan.master_port}",
        rdzv_configs={"is_host": plan.node_rank == 0} if flexible else {"rank": plan.node_rank},
        local_addr=way.address if way else plan.master_addr,
        max_restarts=plan.max_restarts,
        logs_specs=relay,
    )


def _record(rank: int, failure: ProcessFailure, watch: Watch) -> dict[str, Any]:
    noticed = min(time.time(), float(failure.timestamp) + 1)  # torch leaves the fraction out
    return watch.record(rank, failure.pid, failure.exitcode, failure.error_file, noticed)


def _obey(plan: HostPlan, folder: Path, channel: Channel) -> NoReturn:
    """Wait for the order to stop, or for the end of the terminal; then end the ranks, whatever they do."""
    words = channel.order().split()
    number = int(words[1]) if len(words) == 2 else int(signal.SIGTERM)
    deadline = time.monotonic() + plan.grace
    terminate_at = deadline - min(TERMINATE_S, plan.grace / 2)
    hurry = threading.Event()

    def wait_for_a_second_order() -> None:
        if channel.order() == "kill":
            hurry.set()

    threading.Thread(target=wait_for_a_second_order, name="zerofold-hurry", daemon=True).start()
    os.kill(os.getpid(), number)  # torch's agent passes it on to the ranks and starts no new ones
    if number == signal.SIGINT:
        _wait_for_the_end_of_children(terminate_at, hurry)
        for child in _children():
            with contextlib.suppress(psutil.Error):
                child.terminate()
    _wait_for_the_end_of_children(deadline, hurry)
    _kill_the_rest()
    time.sleep(1.0)  # for the main thread, which is about to send the last lines
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def _wait_for_the_end_of_children(deadline: float, hurry: threading.Event) -> None:
    while _children() and time.monotonic() < deadline and not hurry.is_set():
        time.sleep(POLL_S)


def _children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if _runs(child)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended just now
        return False


def _kill_the_rest() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # the thread that waits for orders cannot be woken
