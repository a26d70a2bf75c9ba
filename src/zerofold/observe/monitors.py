"""Where the numbers of a run go: CSV files in DeepSpeed's layout, TensorBoard, Weights & Biases, Prometheus."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zerofold.config import ConfigError, FileMonitor, WandbMonitor


class Event(NamedTuple):
    """One number: "Train/Samples/lr", its value, and the samples trained on so far."""

    name: str
    value: float
    samples: int


class Writer(Protocol):
    def write(self, events: Iterable[Event]) -> None: ...

    def close(self) -> None: ...


class CsvWriter:
    """One file for each name, output_path/job_name/Train_Samples_lr.csv, with a line for each event.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     CsvWriter(FileMonitor("csv_monitor", folder, "run")).write([Event("Train/Samples/lr", 0.1, 8)])
    ...     print((Path(folder) / "run" / "Train_Samples_lr.csv").read_text())
    step,lr
    8,0.1
    <BLANKLINE>

    `after`: the step that a run goes on from. Later lines of files that are there are dropped: they are taken again.
    """

    def __init__(self, settings: FileMonitor, *, after: int | None = None) -> None:
        self._folder = Path(settings.output_path) / settings.job_name
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.csv") if after is not None else ():
            _drop_after(path, after or 0)

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            name = event.name.replace("/", "_").replace(" ", "_")
            with (self._folder / f"{name}.csv").open("a", newline="") as file:
                writer = csv.writer(file, lineterminator=os.linesep)
                if file.tell() == 0:  # a run that is resumed goes on in its files
                    writer.writerow(["step", event.name.rpartition("/")[2]])
                writer.writerow([event.samples, event.value])

    def close(self) -> None:
        """Every event is on disk already."""


def _drop_after(path: Path, step: int) -> None:
    """Also a last line that a kill has cut off. All of the file or nothing is replaced."""
    header, *lines = path.read_text().splitlines(keepends=True) or [""]
    if not header.startswith("step,"):
        return  # somebody else's
    kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
    if kept != lines:
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text("".join([header, *kept]))
        new.replace(path)


def _step_of(line: str) -> float:
    """Infinite, where there is none."""
    try:
        return int(line.partition(",")[0])
    except ValueError:
        return math.inf


class TensorBoardWriter:
    """`after`: as for CSV files; TensorBoard itself hides what it finds of later steps."""

    def __init__(self, settings: FileMonitor, *, after: int | None = None) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = module.SummaryWriter(
            log_dir=str(Path(settings.output_path) / settings.job_name),
            purge_step=None if after is None else after + 1,
        )

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            self._writer.add_scalar(event.name, event.value, event.samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    def __init__(self, settings: WandbMonitor) -> None:
        module: Any = importlib.import_module("wandb")
        self._run = module.init(project=settings.project, group=settings.group, entity=settings.team)

    def write(self, events: Iterable[Event]) -> None:
        by_samples: dict[int, dict[str, float]] = {}
        for event in events:
            by_samples.setdefault(event.samples, {})[event.name] = event.value
        for samples, values in by_samples.items():
            self._run.log(values, step=samples)

    def close(self) -> None:
        self._run.finish()


class PrometheusWriter:
    """A file for the textfile collector of Prometheus' node_exporter, rewritten as one with the latest numbers.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = PrometheusWriter(Path(folder) / "run.prom", {"run": "first"})
    ...     writer.write([Event("train/loss", 2.5, 8)])
    ...     print((Path(folder) / "run.prom").read_text())
    # HELP zerofold_train_loss train/loss of a training run, the latest value.
    # TYPE zerofold_train_loss gauge
    zerofold_train_loss{run="first"} 2.5
    # HELP zerofold_step Optimizer steps, or samples, until now.
    # TYPE zerofold_step gauge
    zerofold_step{run="first"} 8
    <BLANKLINE>
    """

    def __init__(self, path: str | os.PathLike[str], labels: dict[str, str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        self._latest: dict[str, Event] = {}

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            # By the metric: the collector refuses a file that has one twice, and "a b" and "a-b" are one.
            self._latest["zerofold_" + re.sub(r"[^a-zA-Z0-9_]", "_", event.name).lower()] = event
        if not self._latest:
            return
        lines = []
        for metric, event in self._latest.items():
            lines += self._metric(metric, f"{_escaped(event.name)} of a training run, the latest value.", event.value)
        steps = max(event.samples for event in self._latest.values())
        lines += self._metric("zerofold_step", "Optimizer steps, or samples, until now.", steps)
        # The collector may read at any moment, and takes every *.prom it finds: so another ending until it is whole.
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        new.replace(self._path)

    def close(self) -> None:
        """The last numbers stay."""

    def _metric(self, name: str, about: str, value: float) -> list[str]:
        labels = f"{{{self._labels}}}" if self._labels else ""
        return [f"# HELP {name} {about}", f"# TYPE {name} gauge", f"{name}{labels} {_number(value)}"]


def _number(value: float) -> str:
    """As Prometheus writes numbers.

    >>> [_number(value) for value in (1, 0.25, math.inf, -math.inf, math.nan)]
    ['1', '0.25', '+Inf', '-Inf', 'NaN']
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value!r}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def make_writers(
    monitors: Iterable[FileMonitor | WandbMonitor], *, rank: int, after: int | None = None
) -> list[Writer]:
    """On the first rank alone; every rank says so where a package is missing, so that none waits for another. `after`:
    the step that a run goes on from, whose later numbers are to go; None where nobody knows."""
    writers: list[Writer] = []
    for monitor in monitors:
        if is_missing(monitor.kind):
            raise ConfigError(
                f"{monitor.kind}.enabled: true needs the package {monitor.kind}, which is not installed; "
                f"pip install {monitor.kind}, or use csv_monitor"
            )
        if rank == 0:
            writers.append(_make(monitor, after))
    return writers


def is_missing(kind: str) -> bool:
    """Whether a writer of this kind needs a package that is not installed. Both are called what the writer is called.

    >>> is_missing("csv_monitor")
    False
    """
    return kind in ("tensorboard", "wandb") and importlib.util.find_spec(kind) is None


def _make(monitor: FileMonitor | WandbMonitor, after: int | None) -> Writer:
    if isinstance(monitor, WandbMonitor):
        return WandbWriter(monitor)
    kind = CsvWriter if monitor.kind == "csv_monitor" else TensorBoardWriter
    return kind(monitor, after=after)
