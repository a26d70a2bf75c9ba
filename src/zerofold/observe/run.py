"""A run folder for any training loop: metrics, ledger and timeline, as `zerofold train` writes and a report reads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from zerofold.config import FileMonitor, WandbMonitor
from zerofold.engine import Engine
from zerofold.observe.book import book_of, ending, mfu, peak_flops_of, precision_of
from zerofold.observe.ledger import Ledger
from zerofold.observe.monitors import Event, PrometheusWriter, Writer, is_missing, make_writers
from zerofold.observe.predicted import Workload
from zerofold.observe.recording import mean_step
from zerofold.observe.run_files import RunFiles

FLOPS_PER_PARAMETER_AND_TOKEN = 6  # a multiplication and an addition, in forward and twice in backward


class Run:
    """Writes metrics.jsonl, ledger.json and, when it is closed, timeline.json into `folder`. Every rank makes one and
    calls the same methods; the first rank measures and writes.

    every           steps from one line of metrics to the next
    after           the step that a run goes on from; its lines after that are dropped
    flops_per_step  what a step has to compute on one rank, for MFU; by default 6 × parameters × tokens, attention left
                    out
    peak_flops      what a device can compute in a second, for MFU; by default its preset's, where it has one
    workload        makes the model's shape and the batch, for predictions of peak memory and time on a GPU; asked when
                    the run is closed, since a trace takes seconds
    csv, tensorboard, prometheus, wandb
                    other places for the same numbers: files in folder/csv, in folder/tensorboard, the path of a file
                    for node_exporter's textfile collector, a project of Weights & Biases

    >>> import tempfile, torch, zerofold as zf
    >>> folder = tempfile.mkdtemp()
    >>> model = torch.nn.Linear(64, 64)
    >>> model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3)
    >>> with zf.Run(folder, model, every=2) as run:
    ...     for _ in range(4):
    ...         loss = model(torch.ones(8, 64)).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         run.step(loss=loss, lr=1e-3, tokens=8)
    ...         optimizer.zero_grad()
    >>> sorted(path.name for path in Path(folder).iterdir())
    ['ledger.json', 'metrics.jsonl', 'timeline.json']
    >>> zf.close(model)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        *,
        every: int = 10,
        after: int = 0,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        workload: Callable[[], Workload] | None = None,
        csv: bool = False,
        tensorboard: bool = False,
        prometheus: str | os.PathLike[str] | None = None,
        wandb: str | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be a number of steps, at least 1")
        check_writers(tensorboard=tensorboard, wandb=wandb)
        self._engine = Engine.of(model)
        self.is_first = self._engine.groups.control.rank == 0
        self._every, self._flops, self._workload = every, flops_per_step, workload
        self._peak_flops = peak_flops or peak_flops_of(self._engine.device, precision_of(self._engine))
        self.steps, self._tokens, self._losses = after, 0.0, list[Any]()
        self._started = self._line_at = time.perf_counter()
        self._line_tokens = self._line_steps = 0.0
        self.tokens_per_step = 0.0
        self.is_closed = False
        if not self.is_first:
            return
        folder = Path(folder)
        self.files = RunFiles(folder, after=after)
        self._ledger = Ledger(self._engine)
        self._recording = self._ledger.record()
        self._seconds_before, self._steps_before = dict(self._recording.tape.seconds), 0
        self._writers = _writers(folder, csv, tensorboard, prometheus, wandb)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(Exception):  # what ended the loop is what is to be seen
            self.close()

    def step(
        self, *, loss: Tensor | float | None = None, lr: float | None = None, tokens: float = 0, **values: Any
    ) -> None:
        """After every optimizer step; before `zero_grad`, if the gradients are to be seen in the state bytes.

        `tokens` (or samples) are those of all ranks in this step. Other `values` go into the line as they are.
        """
        self.count(tokens)
        if not self.is_first:
            return
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        if self.steps % self._every == 0:
            info = self._engine.last_step
            losses = [float(value) for value in self._losses]  # here, and not in every step: it waits for the device
            self._losses = []
            self.line(
                {
                    "step": self.steps,
                    "seconds": time.perf_counter() - self._started,
                    "loss": sum(losses) / len(losses) if losses else None,
                    "lr": lr,
                    "tokens": self._tokens,
                    "tokens_per_second": self._line_tokens / max(1e-9, time.perf_counter() - self._line_at),
                    "skipped_steps": 0 if info is None else info.skipped_total,
                    **values,
                }
            )

    def count(self, tokens: float) -> None:
        """One step more, without a line."""
        self.steps += 1
        self._tokens += tokens
        self._line_tokens += tokens
        self.tokens_per_step = tokens

    def line(self, values: dict[str, Any], snapshot: dict[str, Any] | None = None) -> dict[str, Any]:
        """Writes `values` with what was measured since the line before; on the first rank only. Returns all of it.

        `snapshot` is one of the ledger, where a better moment for it has been than now.
        """
        snapshot = snapshot or self._ledger.snapshot()
        tape = self._recording.tape
        spent = {name: seconds - self._seconds_before[name] for name, seconds in tape.seconds.items()}
        times = mean_step(spent, tape.steps - self._steps_before)
        self._seconds_before, self._steps_before = dict(tape.seconds), tape.steps
        self._line_at, self._line_tokens = time.perf_counter(), 0.0
        seconds = times.pop("step")
        line = {
            **values,
            "state_bytes": values.get("state_bytes", snapshot["state_bytes"]),
            "comm_bytes": values.get("comm_bytes", snapshot["comm_bytes"]),
            "step_seconds": seconds,
            "mfu": mfu(self.flops_per_step, seconds, self._peak_flops),
            "time": times,
            "peak_bytes": self._recording.peak_bytes(),
        }
        self.files.line(line)
        self.files.ledger(self._book(snapshot))
        events = list(_events(line))
        for writer in self._writers:
            writer.write(events)
        return line

    @property
    def flops_per_step(self) -> float | None:
        if self._flops is not None or not self.tokens_per_step:
            return self._flops
        tokens = self.tokens_per_step / self._engine.groups.control.size
        return FLOPS_PER_PARAMETER_AND_TOKEN * self._engine.psi * tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What is inside is no part of a step: an evaluation, a checkpoint."""
        if not self.is_first or self.is_closed:
            yield
            return
        with self._recording.paused():
            yield

    def close(self) -> list[str]:
        """Writes what is left. Returns a few lines about where the time went, on the first rank; a second time none."""
        if self.is_closed or not self.is_first:
            self.is_closed = True
            return []
        self.is_closed = True
        self._recording.stop()
        snapshot = self._ledger.snapshot()
        self.files.timeline(self._ledger.trace())
        book = self._book(snapshot)
        self.files.ledger(book)
        if self._workload is not None:
            book = self._book(snapshot, self._workload())
            self.files.ledger(book)
        self.files.close()
        for writer in self._writers:
            writer.close()
        return ending(book)

    def _book(self, snapshot: dict[str, Any], workload: Workload | None = None) -> dict[str, Any]:
        return book_of(
            self._engine,
            self._recording,
            snapshot,
            steps=self.steps,
            tokens_per_step=self.tokens_per_step,
            flops_per_step=self.flops_per_step,
            peak_flops=self._peak_flops,
            workload=workload,
        )


def check_writers(*, tensorboard: bool, wandb: str | None) -> None:
    """Raises where a package is missing; on every rank, so that none waits for another."""
    for kind, wanted in (("tensorboard", tensorboard), ("wandb", wandb is not None)):
        if wanted and is_missing(kind):
            raise ValueError(f"{kind} needs the package {kind}, which is not installed: pip install {kind}, or use csv")


def _writers(
    folder: Path, csv: bool, tensorboard: bool, prometheus: str | os.PathLike[str] | None, wandb: str | None
) -> list[Writer]:
    wanted: list[FileMonitor | WandbMonitor] = []
    if csv:
        wanted.append(FileMonitor("csv_monitor", str(folder), "csv"))
    if tensorboard:
        wanted.append(FileMonitor("tensorboard", str(folder), "tensorboard"))
    if wandb is not None:
        wanted.append(WandbMonitor(wandb, None, None))
    found = make_writers(wanted, rank=0)
    return found if prometheus is None else [*found, PrometheusWriter(prometheus, {"run": folder.name})]


def _events(line: dict[str, Any]) -> Iterator[Event]:
    """The numbers of a line; those of a table by its name and theirs."""
    step = line["step"]
    for name, value in line.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in rows:
            if isinstance(number, int | float) and not isinstance(number, bool) and name != "step":
                yield Event(f"train/{name}/{part}".rstrip("/"), float(number), step)
