"""Cuts a tensor's memory into the blocks that are moved by one call, all of them whole pages."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.memory.disk_file import PAGE, whole_pages
from zerofold.memory.disk_space import Extent


class Block(NamedTuple):
    """One transfer: `memory` is the caller's, `parts` the same in whole pages, with a page of our own at its end."""

    cell: int
    offset: int
    memory: memoryview
    parts: list[memoryview]

    @property
    def nbytes(self) -> int:
        return whole_pages(len(self.memory))

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def read(self, fd: int) -> None:
        self._transfer(os.preadv, fd)
        rest = len(self.memory) % PAGE
        if rest:
            self.memory[-rest:] = self.parts[-1][:rest]

    def write(self, fd: int) -> None:
        rest = len(self.memory) % PAGE
        if rest:
            self.parts[-1][:rest] = self.memory[-rest:]
        self._transfer(os.pwritev, fd)

    def _transfer(self, move: Callable[[int, list[memoryview], int], int], fd: int) -> None:
        """All of it, in as many calls as the system wants."""
        parts, offset = self.parts, self.offset
        while parts:
            moved = move(fd, parts, offset)
            pages = moved // PAGE * PAGE  # direct transfers go on at whole pages only
            if not pages:
                raise OSError(errno.EIO, f"only {moved} of the {self.end - offset:,} bytes from {offset:,} on came")
            offset += pages
            while parts and pages >= len(parts[0]):
                pages -= len(parts[0])
                parts = parts[1:]
            if pages:
                parts = [parts[0][pages:], *parts[1:]]


def blocks_of(extent: Extent, offset: int, memory: memoryview, size: int) -> Iterator[Block]:
    """Cut at multiples of `size` from the extent's start, so that two requests on the same bytes meet the same blocks.

    >>> extent, memory = Extent(8192, 40960), memoryview(bytes(10000))
    >>> [(block.offset, block.nbytes, len(block.memory)) for block in blocks_of(extent, 12288, memory, 8192)]
    [(12288, 4096, 4096), (16384, 8192, 5904)]
    """
    start = offset
    while start < offset + len(memory):
        cell = extent.offset + (start - extent.offset) // size * size
        end = min(cell + size, offset + len(memory))
        part = memory[start - offset : end - offset]
        whole = len(part) // PAGE * PAGE
        parts = [part[:whole]] if whole else []
        if whole < len(part):
            parts.append(memoryview(mmap.mmap(-1, PAGE)))
        yield Block(cell, start, part, parts)
        start = end


def bytes_of(tensor: Tensor, what: str) -> memoryview:
    """The tensor's memory; refused if O_DIRECT could not use it."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"the {what} needs a contiguous CPU tensor, not one of shape {tuple(tensor.shape)} and stride "
            f"{tensor.stride()} on {tensor.device}"
        )
    if tensor.data_ptr() % PAGE:
        raise ValueError(
            f"the {what}: the tensor's memory starts {tensor.data_ptr() % PAGE} bytes into a page of {PAGE}; "
            "take it from an arena, or cut it at whole pages"
        )
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
