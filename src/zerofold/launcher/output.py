"""What the ranks write, on the terminal and in files: whole lines, each with its rank in front."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TextIO

KEPT_LINES = 25
# Where there is no terminal to draw on, an unfinished line (a progress bar) is shown this often.
SNAPSHOT_S = 30.0
CLEAR = "\r\x1b[K"


class Output:
    """
    >>> output = Output(several_hosts=True)
    >>> output.lines("b", 3, "stdout", ["step 1"])
    b [rank 3] step 1
    """

    def __init__(
        self,
        *,
        several_hosts: bool = False,
        only_ranks: Collection[int] | None = None,
        log_dir: Path | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self._several_hosts = several_hosts
        self._log_dir = log_dir
        # With files the terminal stays readable: rank 0 alone, unless others are asked for.
        self._only_ranks = [0] if log_dir is not None and only_ranks is None else only_ranks
        self._streams = {"stdout": stdout or sys.stdout, "stderr": stderr or sys.stderr}
        self._files: dict[int, TextIO] = {}
        self._last: dict[int, deque[str]] = {}
        self._live: dict[int, str] = {}
        self._snapshots: dict[int, float] = {}

    def lines(self, host: str, rank: int, stream: str, lines: Sequence[str]) -> None:
        self._last.setdefault(rank, deque(maxlen=KEPT_LINES)).extend(lines)
        self._live.pop(rank, None)
        if self._log_dir is not None:
            self._file(rank).writelines(f"{line}\n" for line in lines)
        if self._shows(rank):
            prefix = self._prefix(host, rank)
            self._write(stream, [f"{prefix}{line}" for line in lines])

    def live(self, host: str, rank: int, stream: str, text: str) -> None:
        """A line that is not finished: drawn in place on a terminal, else shown now and then."""
        if not self._shows(rank):
            return
        if self._streams[stream].isatty():
            self._live[rank] = f"{self._prefix(host, rank)}{text}"
            self._write(stream, [])
        elif time.monotonic() - self._snapshots.setdefault(rank, time.monotonic()) > SNAPSHOT_S:
            self._snapshots[rank] = time.monotonic()
            self._write(stream, [f"{self._prefix(host, rank)}{text}"])

    def note(self, text: str) -> None:
        """A line of the launcher itself, or of a remote shell."""
        self._write("stderr", text.splitlines())

    def last_lines(self, rank: int) -> list[str]:
        return list(self._last.get(rank, ()))

    def close(self) -> None:
        self._live.clear()
        self._write("stderr", [])
        for file in self._files.values():
            file.close()

    def _shows(self, rank: int) -> bool:
        return self._only_ranks is None or rank in self._only_ranks

    def _prefix(self, host: str, rank: int) -> str:
        return f"{host} [rank {rank}] " if self._several_hosts else f"[rank {rank}] "

    def _file(self, rank: int) -> TextIO:
        if rank not in self._files:
            assert self._log_dir is not None
            path = self._log_dir / f"rank-{rank}.log"
            self._files[rank] = path.open("w", encoding="utf-8", buffering=1)
        return self._files[rank]

    def _write(self, stream: str, lines: Sequence[str]) -> None:
        out = self._streams[stream]
        draws = out.isatty()
        parts = [CLEAR] if draws else []
        parts += [f"{line}\n" for line in lines]
        if draws and self._live:
            # One line at the bottom, that of the lowest rank which has one: more would need the whole screen.
            width = shutil.get_terminal_size().columns - 1
            parts.append(self._live[min(self._live)][:width])
        text, encoding = "".join(parts), out.encoding or "utf-8"
        # A terminal without the letters for it shows an escape.
        out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        out.flush()
