"""When and how each rank of a host ended, and the end of those that outlive the failure of another one."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

POLL_S = 0.01  # shorter than the 0.1 s of torch's agent, which would ask first for the end of a rank


@dataclass
class _Rank:
    rank: int
    error_file: Path
    pid: int | None = None
    exit_code: int | None = None
    """None while it runs, and where torch's agent was faster to ask for it."""


class Watch:
    """torch's agent looks at its ranks now and then, notes whole seconds, and gives the others of a failed rank 30 s.
    Here a thread per rank waits for its end, and the others get `grace` seconds.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._ranks: list[_Rank] = []
        self._ended_at: dict[int, float] = {}
        self._killed: set[int] = set()

    def begin(self, error_files: dict[int, Path]) -> None:
        """A new start of all ranks; each writes its process number beside its error file."""
        self._ranks = [_Rank(rank, file) for rank, file in error_files.items()]
        if hasattr(os, "waitid"):
            for rank in self._ranks:
                name = f"zerofold-watch-{rank.rank}"
                threading.Thread(target=self._wait_for, args=(rank, self._ranks), name=name, daemon=True).start()

    def failures(self) -> list[dict[str, Any]]:
        """Those of the last start, as far as they were seen."""
        return [
            self.record(rank.rank, rank.pid, rank.exit_code, rank.error_file)
            for rank in self._ranks
            if rank.pid is not None and rank.exit_code
        ]

    def record(
        self, rank: int, pid: int, exit_code: int, error_file: str | Path, noticed: float | None = None
    ) -> dict[str, Any]:
        """What the terminal is told of a failure. A rank that raised failed then, and with the code that it meant to
        end with: while it ended, torch's agent may have sent it a signal.
        """
        message, trace = "", ""
        when = self._ended_at.get(pid) or noticed or time.time()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads(Path(error_file).read_text())["message"]
            message, trace, extra = told["message"], told["extraInfo"]["py_callstack"], told["extraInfo"]
            when = float(extra.get("time", when))
            exit_code = int(extra.get("exit_code", 1 if exit_code < 0 else exit_code))
        return {
            "rank": rank,
            "exit_code": exit_code,
            "message": message,
            "trace": trace,
            "when": when,
            "by_agent": pid in self._killed,
        }

    def _wait_for(self, rank: _Rank, together: list[_Rank]) -> None:
        pid_file = Path(f"{rank.error_file}.pid")
        while rank.pid is None:
            if self._ranks is not together:
                return
            with contextlib.suppress(OSError, ValueError):
                rank.pid = int(pid_file.read_text())
            time.sleep(POLL_S)
        try:
            end = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # torch's agent asked first
            failed = rank.error_file.exists()
        else:
            assert end is not None
            rank.exit_code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            failed = rank.exit_code != 0
        self._ended_at[rank.pid] = time.time()
        if failed:
            time.sleep(self._grace)
            self._kill(together)

    def _kill(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            if rank.pid is not None and rank.pid not in self._ended_at:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(rank.pid)
                    if process.ppid() == os.getpid():
                        self._killed.add(rank.pid)
                        process.kill()
