"""Where the numbers of a run go: CSV files in DeepSpeed's layout, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
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
    """

    def __init__(self, settings: FileMonitor) -> None:
        self._folder = Path(settings.output_path) / settings.job_name
        self._folder.mkdir(parents=True, exist_ok=True)

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


class TensorBoardWriter:
    def __init__(self, settings: FileMonitor) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = module.SummaryWriter(log_dir=str(Path(settings.output_path) / settings.job_name))

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


def make_writers(monitors: Iterable[FileMonitor | WandbMonitor], *, rank: int) -> list[Writer]:
    """On the first rank alone; every rank says so where a package is missing, so that none waits for another."""
    writers: list[Writer] = []
    for monitor in monitors:
        package = {"tensorboard": "tensorboard", "wandb": "wandb"}.get(monitor.kind)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{monitor.kind}.enabled: true needs the package {package}, which is not installed; "
                f"pip install {package}, or use csv_monitor"
            )
        if rank == 0:
            writers.append(_make(monitor))
    return writers


def _make(monitor: FileMonitor | WandbMonitor) -> Writer:
    if isinstance(monitor, WandbMonitor):
        return WandbWriter(monitor)
    return CsvWriter(monitor) if monitor.kind == "csv_monitor" else TensorBoardWriter(monitor)
