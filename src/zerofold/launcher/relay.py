"""What the ranks of a host write, sent on as whole lines.

    rank 0 stdout ─► named pipe ─┐
    rank 0 stderr ─► named pipe ─┼─► one thread ─► messages {"kind": "lines", "rank", "stream", "lines"}
    rank 1 stdout ─► named pipe ─┘                          {"kind": "live", "rank", "stream", "text"}

A named pipe and not a plain one: torch's agent opens the files of its workers by path, again at every restart.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from zerofold.launcher.watch import Watch

STREAMS = ("stdout", "stderr")
CHUNK = 1 << 16
LONGEST_LINE = 1 << 20
LIVE_EVERY_S = 0.2
# Moves of the cursor, by which nested progress bars draw above each other; colours stay.
CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")

Send = Callable[..., None]


class Lines:
    """Bytes in, whole lines out. Of a line that was drawn over after a carriage return the last state counts.

    >>> lines = Lines()
    >>> lines.feed(b"one\\n10%\\r20%")
    ['one']
    >>> lines.unfinished()
    '20%'
    >>> lines.feed(b"\\r30%\\ntwo"), lines.rest()
    (['30%'], ['two'])
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def feed(self, data: bytes) -> list[str]:
        *whole, self._text = (self._text + self._decoder.decode(data)).split("\n")
        if "\r" in self._text:
            end = "\r" if self._text.endswith("\r") else ""
            self._text = _last_state(self._text) + end
        if len(self._text) > LONGEST_LINE:
            whole.append(self._text)
            self._text = ""
        shown = [_last_state(line) for line in whole]
        return [line for line, raw in zip(shown, whole, strict=True) if line or not raw.strip("\r")]

    def unfinished(self) -> str:
        return _last_state(self._text)

    def rest(self) -> list[str]:
        text, self._text = self.unfinished(), ""
        return [text] if text else []


def _last_state(text: str) -> str:
    states = [CURSOR.sub("", state) for state in text.split("\r")]
    return next((state for state in reversed(states) if state.strip()), "" if len(states) > 1 else states[0])


@dataclass
class _Pipe:
    local_rank: int
    stream: str
    file: int
    lines: Lines = field(default_factory=Lines)
    shown: str = ""
    """The unfinished line as it was last sent on."""


class Relay(LogsSpecs):
    """The pipes of one host's ranks, and the thread that empties them."""

    def __init__(self, folder: Path, local_world: int, send: Send, watch: Watch) -> None:
        super().__init__()
        self._folder = folder
        self._send = send
        self._watch = watch
        self._starts = 0
        self._ranks: dict[int, int] = {}
        self._pipes = [self._open(rank, stream) for rank in range(local_world) for stream in STREAMS]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerofold-relay", daemon=True)
        self._thread.start()

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Where torch's agent lets its workers write; called once for every start of them."""
        self._ranks = {local_rank: int(values["RANK"]) for local_rank, values in envs.items()}
        if self._starts:
            self._send("restarted", failures=self._watch.failures())
        # Not torch's count of restarts, which grows only on the hosts where a rank failed.
        self._starts += 1
        files = {rank: self._folder / f"error-{self._starts}-{rank}.json" for rank in envs}
        for local_rank, values in envs.items():
            values["TORCHELASTIC_ERROR_FILE"] = str(files[local_rank])
        self._watch.begin({self.rank_of(local_rank): file for local_rank, file in files.items()})
        return LogsDest(
            stdouts={rank: str(self._path(rank, "stdout")) for rank in envs},
            stderrs={rank: str(self._path(rank, "stderr")) for rank in envs},
            error_files={rank: values["TORCHELASTIC_ERROR_FILE"] for rank, values in envs.items()},
        )

    def rank_of(self, local_rank: int) -> int:
        return self._ranks.get(local_rank, local_rank)

    def finish(self) -> None:
        """Send on what is left; the ranks have ended."""
        self._ending.set()
        self._thread.join()

    def _path(self, local_rank: int, stream: str) -> Path:
        return self._folder / f"{stream}-{local_rank}"

    def _open(self, local_rank: int, stream: str) -> _Pipe:
        path = self._path(local_rank, stream)
        os.mkfifo(path)
        # Also for writing: then it has no end while a rank starts again, and nobody waits for the other side to open.
        return _Pipe(local_rank, stream, os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for pipe in self._pipes:
                selector.register(pipe.file, selectors.EVENT_READ, pipe)
            live_at = 0.0
            while not self._ending.is_set():
                for key, _ in selector.select(LIVE_EVERY_S):
                    self._read(key.data)
                if time.monotonic() >= live_at:
                    live_at = time.monotonic() + LIVE_EVERY_S
                    self._send_live()
        for pipe in self._pipes:
            while self._read(pipe):
                pass
            self._send_lines(pipe, pipe.lines.rest())
            os.close(pipe.file)

    def _read(self, pipe: _Pipe) -> bool:
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(pipe.file, CHUNK)
        self._send_lines(pipe, pipe.lines.feed(data))
        return bool(data)

    def _send_lines(self, pipe: _Pipe, lines: list[str]) -> None:
        if lines:
            pipe.shown = ""
            self._send_for(pipe, "lines", lines=lines)

    def _send_live(self) -> None:
        for pipe in self._pipes:
            text = pipe.lines.unfinished()
            if text and text != pipe.shown:
                pipe.shown = text
                self._send_for(pipe, "live", text=text)

    def _send_for(self, pipe: _Pipe, kind: str, **content: Any) -> None:
        self._send(kind, rank=self.rank_of(pipe.local_rank), stream=pipe.stream, **content)
