"""One function in a process of its own, which begins with nothing of another's memory and leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

import psutil

START = "from zerofold.bench.alone import main; main()"


class AloneError(Exception):
    """The function raised, the process died or its time was up; the message is what a user should read."""


@dataclass(frozen=True)
class _Raised:
    reason: str


@dataclass(frozen=True)
class _Late:
    """There was no answer in time."""


@dataclass(frozen=True)
class _Told:
    news: object


def run_alone(
    function: str,
    *arguments: object,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    hear: Callable[[Any], None] | None = None,
) -> Any:
    """What the function returns, named as "module:function".

    After `timeout` seconds, or when this process is interrupted, it is killed with all processes that it started. With
    `hear`, the function is given `tell=` as well, and what it calls that with comes here while it runs.
    """
    deadline = time.monotonic() + timeout
    ours, theirs = Pipe()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs.fileno())],
            # What can be imported here can be imported there, installed or not.
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # whatever it starts is in this session too
        )
        theirs.close()  # or its death would not close the pipe
        try:
            ours.send((function, arguments, hear is not None))
            answer = _answer(ours, deadline, hear)
            if isinstance(answer, _Late):
                raise AloneError(f"not done after {timeout:.0f} s, so it was killed{_last_line(log)}")
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise AloneError(_explain_end(process.wait(), log)) from None
        finally:
            _kill_session(process.pid)
            process.wait()
            ours.close()
    if isinstance(answer, _Raised):
        raise AloneError(answer.reason)
    return answer


def _answer(connection: Connection, deadline: float, hear: Callable[[Any], None] | None) -> Any:
    """What the function returned or raised; what it told before is passed on."""
    while connection.poll(max(0.0, deadline - time.monotonic())):
        answer = connection.recv()
        if not isinstance(answer, _Told):
            return answer
        if hear is not None:
            hear(answer.news)
    return _Late()


def _kill_session(session: int) -> None:
    """By session and not by process group: ninja gives every compiler a group of its own."""
    found = True
    while found:  # one of them may just have started another
        found = False
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    found = True


def _explain_end(code: int, log: IO[bytes]) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if code == -signal.SIGKILL:
        how += ", which the system sends when host memory runs out"
    return how + _last_line(log)


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return f"; its last line: {lines[-1].strip()}" if lines else ""


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    path, arguments, is_heard = connection.recv()
    module, _, name = path.partition(":")
    options = {"tell": lambda news: connection.send(_Told(news))} if is_heard else {}
    try:
        connection.send(getattr(importlib.import_module(module), name)(*arguments, **options))
    except Exception as error:
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        connection.send(_Raised(f"{type(error).__name__}: {first_line}"))
