"""The text to learn: the source of the Python standard library of this machine. Nothing is downloaded.

    [ first file | second file | ...                        | last files ]
      training, in windows of `seq` bytes                    validation, 5%

Training takes the windows in the order of `zf.Samples`, so a run can be repeated and resumed exactly.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

# Not the library itself: its tests, and what was installed into it.
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
DEFAULT_LIMIT_BYTES = 16 * 2**20
VALIDATION_SHARE = 0.05


class Batch(NamedTuple):
    tokens: Tensor  # [batch, seq]
    targets: Tensor  # [batch, seq], the tokens one byte further on


def library_source(folder: Path | None = None, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> bytes:
    """The library's source files, folder by folder in the order of their names, cut at the limit."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for parent, folders, files in os.walk(folder):
        # In place and sorted: `os.walk` then skips whole folders and goes on in the same order everywhere.
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py") and len(text) < limit_bytes:
                text += Path(parent, name).read_bytes()
    if not text:
        raise ValueError(f"no Python source under {folder}: use a Python whose standard library is unpacked")
    return bytes(text[:limit_bytes])


class ByteText:
    """A text cut into training and validation windows of `seq` bytes."""

    def __init__(self, text: bytes, *, seq: int) -> None:
        held_out = max(int(len(text) * VALIDATION_SHARE), seq + 1)
        if len(text) < 2 * held_out:
            raise ValueError(f"{len(text)} bytes of text are too few for sequences of {seq}: use a shorter sequence")
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.seq = seq
        self.training, self.validation = tokens[:-held_out], tokens[-held_out:]

    @property
    def windows(self) -> int:
        """How many windows of training text there are, end to end."""
        return (len(self.training) - 1) // self.seq

    def window_batch(self, indices: list[int]) -> Batch:
        return self._windows(self.training, torch.tensor(indices) * self.seq)

    def batch(self, size: int, *, seed: int, step: int, rank: int) -> Batch:
        """`size` random windows of the training text, a pure function of seed, step and rank."""
        generator = numpy.random.default_rng([seed, step, rank])
        starts = generator.integers(0, len(self.training) - self.seq, size)
        return self._windows(self.training, torch.from_numpy(starts))

    def validation_batch(self, size: int, *, rank: int, world: int) -> Batch:
        """This rank's `size` windows out of size × world that are spread evenly over the held-out text."""
        starts = torch.linspace(0, len(self.validation) - self.seq - 1, size * world).long()
        return self._windows(self.validation, starts[rank::world])

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self.seq + 1)].long()
        return Batch(windows[:, :-1], windows[:, 1:])
