"""The process of an agent: a command that reaches another host, or a copy of this process for the host it is on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import IO, NoReturn, Protocol

POLL_S = 0.02


class Process(Protocol):
    """What subprocess.Popen and `Copy` have in common."""

    stdin: IO[str] | None
    stdout: IO[str] | None
    stderr: IO[str] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def start_command(command: Sequence[str]) -> Process:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends them in order
    )


class Copy:
    """A fork of this process that runs `entry` and ends. A new Python would import torch and zerofold once more, which
    takes seconds. This process must have no threads yet.
    """

    def __init__(self, entry: Callable[[], int]) -> None:
        ours, theirs = [], []
        for to_child in (True, False, False):
            read, write = os.pipe()
            ours.append(write if to_child else read)
            theirs.append(read if to_child else write)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_the_child(entry, ours, theirs)
        for file in theirs:
            os.close(file)
        self.stdin: IO[str] | None = os.fdopen(ours[0], "w", encoding="utf-8")
        self.stdout: IO[str] | None = os.fdopen(ours[1], "r", encoding="utf-8", errors="replace")
        self.stderr: IO[str] | None = os.fdopen(ours[2], "r", encoding="utf-8", errors="replace")
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the agent of this host", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _be_the_child(entry: Callable[[], int], ours: Sequence[int], theirs: Sequence[int]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        for number, file in enumerate(theirs):
            os.dup2(file, number)
        # The other ends too: while the child holds one, it would not see that the terminal is gone.
        for file in (*ours, *theirs):
            os.close(file)
        code = entry()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
