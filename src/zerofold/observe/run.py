"""A run folder for any training loop: metrics, ledger and timeline, as `zerofold train` writes and a report reads."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from zerofold.agree import agree
from zerofold.config import FileMonitor, WandbMonitor
from zerofold.engine import Engine
from zerofold.observe.book import book_of, ending, mfu, peak_flops_of, precision_of
from zerofold.observe.ledger import Ledger
from zerofold.observe.monitors import Event, PrometheusWriter, Writer, is_missing, make_writers
from zerofold.observe.predicted import Workload
from zerofold.observe.recording import mean_step
from zerofold.observe.run_files import RunFiles

FLOPS_PER_PARAMETER_AND_TOKEN = 6  # a multiplication and an addition, in forward and twice in backward
_COUNTED = ("step", "seconds", "tokens_per_second", "skipped_steps")
"""What a run knows by itself."""


class Run:
    """Writes metrics.jsonl, ledger.json and, when it is closed, timeline.json into `folder`. Every rank makes one and
    calls the same methods; the first rank measures and writes. A disk that is full does not end the training: it is
    said once, and numbers are missing.

    every           steps from one line of metrics to the next
    after           the step that a run goes on from; its lines after that are dropped, with 0 all of them,
                    and so are those of its CSV files
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
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} must be a number of steps, at least 1")
        check_writers(tensorboard=tensorboard, wandb=wandb)
        self._engine = Engine.of(model)
        self.is_first = self._engine.is_first
        self._every, self._flops, self._workload = every, flops_per_step, workload
        self._peak_flops = peak_flops or peak_flops_of(self._engine.device, precision_of(self._engine))
        self.steps, self._tokens, self._losses = after, 0.0, list[Any]()
        self._first, self._tokens_before = after, 0.0
        self._unwritten: Callable[[], dict[str, Any]] | None = None
        self._started = self._line_at = time.perf_counter()
        self._line_tokens, self._line_steps = 0.0, 0
        self.is_closed = self._has_warned = False
        wanted = csv, tensorboard, prometheus, wandb
        # A folder that cannot be written is known to one rank, and the others would wait for it.
        self._agree(lambda: self._open(Path(folder), after, wanted) if self.is_first else None)
        if self.is_first:
            self._recording = self._ledger.record()
            self._seconds_before, self._steps_before = dict(self._recording.tape.seconds), 0

    def _agree(self, action: Callable[[], None]) -> None:
        """Among all ranks: those that this one shares states with, and those that have other parts of the model."""
        groups, failure = self._engine.groups, None
        try:
            agree(groups.control, action)
        except Exception as error:
            failure = error
        if groups.model is not None:
            groups.model.raise_together(failure)
        if failure is not None:
            raise failure

    def _open(self, folder: Path, after: int, wanted: tuple[Any, ...]) -> None:
        if self._engine.clock.tape is not None:
            raise RuntimeError("this model is being recorded already: close its zf.Run, or stop that recording, first")
        self._ledger = Ledger(self._engine)
        try:
            self.files = RunFiles(folder, after=after)
        except OSError as error:
            raise ValueError(f"{folder} cannot be a run folder ({error.strerror}): name another") from error
        self._tokens = self._tokens_before = self.files.last_number("tokens")
        self._started -= self.files.last_number("seconds")
        self._writers = _writers(folder, after, *wanted)

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
        if self.is_closed:
            raise RuntimeError(
                "this run is closed: make another zf.Run for further steps, with after= for the same folder"
            )
        if taken := [name for name in _COUNTED if name in values]:
            raise ValueError(f"{taken[0]}= is counted by the run itself: leave it out, or give it another name")
        # Here, on every rank: it is read later, on the first alone, which the others would wait for.
        if loss is not None and (not hasattr(loss, "__float__") or (isinstance(loss, Tensor) and loss.numel() != 1)):
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"loss= is {what}: give one number, such as the mean loss of the step")
        self.count(tokens)
        if not self.is_first:
            return
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        self._unwritten = lambda: {"lr": _plain(lr), **{name: _plain(value) for name, value in values.items()}}
        if self.steps % self._every == 0:
            self._write_steps()

    def _write_steps(self) -> None:
        """A line for the steps since the line before."""
        if self._unwritten is None:
            return
        info, now = self._engine.last_step, time.perf_counter()
        losses = [float(value) for value in self._losses]  # here, and not in every step: it waits for the device
        given, self._losses, self._unwritten = self._unwritten(), [], None
        self.line(
            {
                "step": self.steps,
                "seconds": now - self._started,
                "loss": sum(losses) / len(losses) if losses else None,
                "lr": given.pop("lr"),
                "tokens": self._tokens,
                "tokens_per_second": self._line_tokens / max(1e-9, now - self._line_at),
                "skipped_steps": 0 if info is None else info.skipped_total,
                **given,
            }
        )

    def count(self, tokens: float) -> None:
        """One step more, without a line."""
        self.steps += 1
        self._tokens += tokens
        self._line_tokens += tokens
        self._line_steps += 1

    def line(self, values: dict[str, Any], snapshot: dict[str, Any] | None = None) -> dict[str, Any]:
        """Writes `values` with what was measured since the line before; on the first rank only. Returns all of it.

        `snapshot` is one of the ledger, where a better moment for it has been than now.
        """
        snapshot = snapshot or self._ledger.snapshot()
        tape = self._recording.tape
        spent = {name: seconds - self._seconds_before[name] for name, seconds in tape.seconds.items()}
        times = mean_step(spent, tape.steps - self._steps_before)
        flops = self._flops_of(self._line_tokens / max(1, self._line_steps))
        self._seconds_before, self._steps_before = dict(tape.seconds), tape.steps
        self._line_at, self._line_tokens, self._line_steps = time.perf_counter(), 0.0, 0
        seconds = times.pop("step")
        line = {
            **values,
            "state_bytes": values.get("state_bytes", snapshot["state_bytes"]),
            "comm_bytes": values.get("comm_bytes", snapshot["comm_bytes"]),
            "step_seconds": seconds,
            "mfu": mfu(flops, seconds, self._peak_flops),
            "time": times,
            "peak_bytes": self._recording.peak_bytes(),
        }
        self._try(lambda: self.files.line(line))
        self._try(lambda: self.files.ledger(self._book(snapshot)))
        events = list(_events(line))
        for writer in self._writers:
            self._try(partial(writer.write, events))
        return line

    def _try(self, write: Callable[[], None]) -> None:
        """The other ranks are in the next step already: an error here would leave them waiting."""
        try:
            write()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                text = f"numbers of this run are missing in {self.files.folder}: {error}; the training goes on"
                warnings.warn(text, stacklevel=5)

    @property
    def tokens_per_step(self) -> float:
        """Of the mean step."""
        return (self._tokens - self._tokens_before) / max(1, self.steps - self._first)

    @property
    def flops_per_step(self) -> float | None:
        return self._flops_of(self.tokens_per_step)

    def _flops_of(self, tokens: float) -> float | None:
        if self._flops is not None or not tokens:
            return self._flops
        return FLOPS_PER_PARAMETER_AND_TOKEN * self._engine.whole_psi * tokens / self._engine.world

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What is inside is no part of a step: an evaluation, a checkpoint."""
        if not self.is_first or self.is_closed:
            yield
            return
        begin = time.perf_counter()
        with self._recording.paused():
            yield
        self._line_at += time.perf_counter() - begin

    def close(self) -> list[str]:
        """Writes what is left. Returns a few lines about where the time went, on the first rank; a second time none."""
        if self.is_closed or not self.is_first:
            self.is_closed = True
            return []
        self.is_closed = True
        self._recording.stop()
        self._write_steps()
        snapshot = self._ledger.snapshot()
        self._try(lambda: self.files.timeline(self._ledger.trace()))
        book = self._book(snapshot)
        self._try(lambda: self.files.ledger(book))
        if self._workload is not None:
            book = self._book(snapshot, self._workload())
            self._try(lambda: self.files.ledger(book))
        self._try(self.files.close)
        for writer in self._writers:
            self._try(writer.close)
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
    folder: Path, after: int, csv: bool, tensorboard: bool, prometheus: str | os.PathLike[str] | None, wandb: str | None
) -> list[Writer]:
    wanted: list[FileMonitor | WandbMonitor] = []
    if csv:
        wanted.append(FileMonitor("csv_monitor", str(folder), "csv"))
    if tensorboard:
        wanted.append(FileMonitor("tensorboard", str(folder), "tensorboard"))
    if wandb is not None:
        wanted.append(WandbMonitor(wandb, None, None))
    found = make_writers(wanted, rank=0, after=after)
    return found if prometheus is None else [*found, PrometheusWriter(prometheus, {"run": folder.name})]


def _events(line: dict[str, Any]) -> Iterator[Event]:
    """The numbers of a line; those of a table by its name and theirs."""
    step = line["step"]
    for name, value in line.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in rows:
            if isinstance(number, int | float) and not isinstance(number, bool) and name != "step":
                yield Event(f"train/{name}/{part}".rstrip("/"), float(number), step)


def _plain(value: Any) -> Any:
    """A number that a line can hold, of a tensor with one.

    >>> _plain(Tensor([0.5])), _plain("text")
    (0.5, 'text')
    """
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    return value.item() if type(value).__module__ == "numpy" and value.size == 1 else value
