"""What a config asks to see while training goes on. Whatever is switched off costs nothing."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerofold.access import ledger
from zerofold.compat.flops import FlopsCounter, flops_report, write_report
from zerofold.config import Settings
from zerofold.observe.monitors import Event, make_writers

_PHASES = ("forward", "backward", "step")


class Reporter:
    """Told of every phase of training; prints, writes and measures what the settings say, on the first rank.

    >>> import torch, zerofold as zf
    >>> from zerofold.config import resolve
    >>> model = zf.shard(torch.nn.Linear(4, 4), stage=2)
    >>> settings = resolve({"steps_per_print": 1, "timers": {"throughput": {"enabled": False}}}, world=1,
    ...                    device=torch.device("cpu"))
    >>> reporter = Reporter(settings, model, rank=0, world=1, device=torch.device("cpu"))
    >>> reporter.before_step()
    >>> reporter.after_step(1, samples=8, lr=[0.1], loss=None, loss_scale=1.0, skipped=0)
    step 1: skipped 0, lr 0.1
    >>> zf.close(model)
    """

    def __init__(self, settings: Settings, model: nn.Module, *, rank: int, world: int, device: torch.device) -> None:
        self._settings, self._model, self._rank, self._world, self._device = settings, model, rank, world, device
        self._writers = make_writers(settings.monitors, rank=rank)
        self._clock = PhaseClock(device) if settings.wall_clock_breakdown else None
        self._step = 0
        self._since = (time.perf_counter(), 0)  # of the line before: when, and samples by then
        self._bytes: dict[str, int] = {}
        profiles = settings.flops_profiler is not None and rank == 0
        self._counter = FlopsCounter(model) if profiles else None

    def before_forward(self) -> None:
        if self._clock is not None and self._model.training:
            self._clock.start("forward")
        if self._is_profiled:
            assert self._counter is not None
            self._counter.start()

    def after_forward(self) -> None:
        if self._is_profiled:
            self._report_flops()
        if self._clock is not None and self._model.training:
            self._clock.stop("forward")

    def before_backward(self) -> None:
        if self._clock is not None:
            self._clock.start("backward")

    def after_backward(self) -> None:
        if self._clock is not None:
            self._clock.stop("backward")

    def before_step(self) -> None:
        if self._clock is not None:
            self._clock.start("step")

    def after_step(
        self,
        step: int,
        *,
        samples: int,
        lr: Sequence[float],
        loss: Tensor | None,
        loss_scale: float,
        skipped: int,
    ) -> None:
        """`step` and `samples` are those done so far over all ranks, `skipped` the steps among them."""
        self._step = step
        spent = {}
        if self._clock is not None:
            self._clock.stop("step")
            spent = self._clock.take()
        if self._rank != 0:
            return
        if self._writers:
            self._write(samples, lr, loss, loss_scale, spent)
        if self._settings.comms_logger is not None and self._settings.comms_logger.verbose:
            print(f"step {step}: {self._sent()}", flush=True)
        every = self._settings.steps_per_print
        if every is not None and step % every == 0:
            self._print(step, samples, lr, loss_scale, skipped, spent)

    def log_summary(self) -> list[str]:
        """Prints what has been sent since the start, by collective; the lines also come back.

        Empty where comms_logger is off.
        """
        if self._settings.comms_logger is None:
            return []
        books = ledger(self._model).snapshot()
        lines = [f"{'collective':<24}{'calls':>10}{'bytes sent':>18}{'bytes a call':>16}"]
        for operation, sent in sorted(books["comm_bytes"].items(), key=lambda item: -item[1]):
            if self._shows(operation):
                calls = books["comm_calls"].get(operation, 0)
                lines.append(f"{operation:<24}{calls:>10}{sent:>18,}{sent // max(1, calls):>16,}")
        if self._rank == 0:
            print("\n".join(lines), flush=True)
        return lines

    def close(self) -> None:
        if self._counter is not None:
            self._counter.stop()
        for writer in self._writers:
            writer.close()
        self._writers = []

    @property
    def _is_profiled(self) -> bool:
        profiler = self._settings.flops_profiler
        return self._counter is not None and profiler is not None and self._step + 1 == profiler.profile_step

    def _report_flops(self) -> None:
        counter, profiler = self._counter, self._settings.flops_profiler
        assert counter is not None
        assert profiler is not None
        counter.stop()
        self._counter = None  # once
        micro = self._settings.micro_batch
        lines = flops_report(counter, profiler, step=profiler.profile_step, world=self._world, batch=micro)
        write_report(lines, profiler.output_file)

    def _write(
        self, samples: int, lr: Sequence[float], loss: Tensor | None, loss_scale: float, spent: dict[str, float]
    ) -> None:
        values: dict[str, float] = {}
        if loss is not None:
            values["train_loss"] = float(loss)
        if lr:
            values["lr"] = lr[0]
        if self._is_fp16:
            values["loss_scale"] = loss_scale
        values |= {f"elapsed_time_ms_{phase}": ms for phase, ms in spent.items()}
        events = [Event(f"Train/Samples/{name}", value, samples) for name, value in values.items()]
        for writer in self._writers:
            writer.write(events)

    def _print(
        self,
        step: int,
        samples: int,
        lr: Sequence[float],
        loss_scale: float,
        skipped: int,
        spent: dict[str, float],
    ) -> None:
        parts = [f"skipped {skipped}", "lr " + ", ".join(f"{rate:g}" for rate in lr)]
        if self._is_fp16:
            parts.append(f"loss scale {loss_scale:g}")
        now = time.perf_counter()
        if self._settings.throughput:
            parts.append(f"{(samples - self._since[1]) / (now - self._since[0]):.1f} samples/s")
        self._since = now, samples
        if spent:
            parts.append(", ".join(f"{phase} {ms:.1f} ms" for phase, ms in spent.items()))
        if self._settings.memory_breakdown:
            parts.append(self._memory())
        print(f"step {step}: {', '.join(parts)}", flush=True)

    @property
    def _is_fp16(self) -> bool:
        policy = self._settings.precision
        return policy is not None and policy.parameters is torch.float16

    def _memory(self) -> str:
        states = ledger(self._model).snapshot()["state_bytes"]
        parts = [f"{state} {nbytes / 2**20:.1f} MiB" for state, nbytes in states.items()]
        if self._device.type == "cpu":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        else:
            peak = torch.accelerator.max_memory_allocated(self._device)
        return ", ".join([*parts, f"peak {peak / 2**20:.1f} MiB"])

    def _sent(self) -> str:
        now: dict[str, int] = ledger(self._model).snapshot()["comm_bytes"]
        fresh = {name: sent - self._bytes.get(name, 0) for name, sent in now.items()}
        self._bytes = now
        shown = [f"{name} {sent:,} bytes" for name, sent in fresh.items() if sent and self._shows(name)]
        return "sent " + (", ".join(shown) or "nothing")

    def _shows(self, operation: str) -> bool:
        chosen = self._settings.comms_logger.operations if self._settings.comms_logger is not None else ()
        return not chosen or operation in chosen


class PhaseClock:
    """Milliseconds in each phase of a step, added up over its micro-batches; the device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: dict[str, float] = {}
        self._spent: dict[str, float] = {}

    def start(self, phase: str) -> None:
        self._started[phase] = self._now()

    def stop(self, phase: str) -> None:
        started = self._started.pop(phase, None)
        if started is not None:
            self._spent[phase] = self._spent.get(phase, 0.0) + 1e3 * (self._now() - started)

    def take(self) -> dict[str, float]:
        """What was spent since the last time, in the order of a step."""
        spent, self._spent = self._spent, {}
        return {phase: spent[phase] for phase in _PHASES if phase in spent}

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
