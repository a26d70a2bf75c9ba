"""One way of `zerofold bench fragmentation` in a process of its own, whose allocator begins empty."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

import zerofold as zf
from zerofold.activation.cross_entropy import TOKENS
from zerofold.bench.gpt import GPT, Block, GPTSize
from zerofold.bench.mixed_engines import CLIP, make_adamw
from zerofold.bench.offload_worker import open_device


@dataclass(frozen=True, kw_only=True)
class Way:
    """What keeps long-lived tensors apart from short-lived ones."""

    contiguous: bool = False
    """Checkpoints in one block of memory, and gradients in another (M_d)."""
    expandable: bool = False
    """torch's own remedy: segments of its allocator that grow."""

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if self.expandable else {}


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "without": Way(),
        "M_d": Way(contiguous=True),
        "expandable": Way(expandable=True),
        "M_d+expandable": Way(contiguous=True, expandable=True),
    }
)


@dataclass(frozen=True, kw_only=True)
class FragmentationTask:
    way: str
    size: GPTSize
    batch: int
    steps: int
    accumulate: int
    device: str
    """"cpu" or "cuda"."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """At the end of the run. Bytes are None on the CPU, whose allocator keeps no books."""

    peak_reserved: int | None
    peak_allocated: int | None
    fragmentation: float | None
    """The first over the second, as the ledger shows it."""
    loss: float
    given_back: int
    """How often the allocator's cache was, which costs a wait for the device each time."""
    seconds_per_step: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """In the middle of a run, as far as the host has come."""

    step: int
    seconds: float
    peak_reserved: int | None
    peak_allocated: int | None


def lengths_of(task: FragmentationTask) -> list[int]:
    """Of each micro-batch, the same for every way; the longest comes somewhere in the middle, as in real data."""
    drawn = random.Random(0)
    count = task.steps * task.accumulate
    lengths = [drawn.randrange(max(1, task.size.seq // 8), task.size.seq + 1) for _ in range(count)]
    lengths[count // 2] = task.size.seq
    return lengths


def measure(task: FragmentationTask, *, tell: Callable[[Progress], None]) -> Outcome:
    """`tell` is called after every step."""
    device = open_device(task.device, None)
    way = WAYS[task.way]
    torch.manual_seed(0)
    with device:
        model = GPT(task.size, loss_tokens=TOKENS)
    _, optimizer = zf.prepare(
        model,
        make_adamw(model.parameters()),
        stage=3,
        precision="bf16",
        units=Block,
        clip=CLIP,
        accumulate=task.accumulate,
        contiguous_gradients=way.contiguous,
    )
    checkpointing = zf.checkpoint_blocks(model, contiguous=way.contiguous, units=Block)
    # The model was in fp32 before it was sharded: that is no part of the run.
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    start = time.perf_counter()
    for index, length in enumerate(lengths_of(task), start=1):
        tokens = torch.randint(0, task.size.vocab, (task.batch, length + 1), generator=generator).to(device)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if index % task.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            tell(_progress(index // task.accumulate, time.perf_counter() - start, device))
    last = loss.item()  # which waits for the device
    seconds = time.perf_counter() - start
    found = zf.ledger(model).snapshot().get("device_memory", {})
    given_back = 0 if checkpointing.store is None else checkpointing.store.given_back
    checkpointing.remove()
    return Outcome(
        peak_reserved=found.get("peak_reserved"),
        peak_allocated=found.get("peak_allocated"),
        fragmentation=found.get("fragmentation"),
        loss=last,
        given_back=given_back,
        seconds_per_step=seconds / task.steps,
    )


def _progress(step: int, seconds: float, device: torch.device) -> Progress:
    on_cuda = device.type == "cuda"
    return Progress(
        step=step,
        seconds=seconds,
        peak_reserved=torch.cuda.max_memory_reserved(device) if on_cuda else None,
        peak_allocated=torch.cuda.max_memory_allocated(device) if on_cuda else None,
    )
