"""The most memory that a part of a run took on its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MEASURED = "measured: "


class CudaMeter:
    """By the allocator's own count."""

    counts_at_once = True

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        yield

    @contextmanager
    def measuring(self, label: str) -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        self._peaks[label] = torch.cuda.max_memory_allocated()

    def peaks(self) -> dict[str, int]:
        return self._peaks


class CpuMeter:
    """The CPU's allocator keeps no count, so torch's profiler logs every allocation from the first one on. Its log
    is read when nobody is watching any more."""

    counts_at_once = False

    def __init__(self) -> None:
        self._profile: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as self._profile:
            yield

    @contextmanager
    def measuring(self, label: str) -> Iterator[None]:
        with record_function(f"{_MEASURED}{label}"):
            yield

    def peaks(self) -> dict[str, int]:
        events = sorted(self._profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        windows = {
            event.name().removeprefix(_MEASURED): (event.start_ns(), event.end_ns())
            for event in events
            if event.name().startswith(_MEASURED)
        }
        peaks = dict.fromkeys(windows, 0)
        now = 0
        for event in events:
            if event.name() != "[memory]":
                continue
            now += event.nbytes()
            for label, (start, end) in windows.items():
                if start <= event.start_ns() <= end:
                    peaks[label] = max(peaks[label], now)
        return peaks


Meter = CudaMeter | CpuMeter


def meter_on(device: torch.device) -> Meter:
    return CudaMeter() if device.type == "cuda" else CpuMeter()
