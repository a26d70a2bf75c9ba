"""`zerofold bench offload`: a training step with states off the device, side by side.

    round 0   [plain][ds3_cpu][zf3_opt]     each in a process of its own that ends before the next starts, with the
    round 1   [zf3_opt][ds3_cpu][plain]     whole machine for itself: device, cores, host memory and disk

A step may put a part of its update off until the next forward needs it, so the figure of an engine is the time of
the whole window of steps, to the moment the last update is done, over their number.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zerofold.bench import figures
from zerofold.bench.alone import AloneError, run_alone
from zerofold.bench.deepspeed_ops import forget_broken_builds
from zerofold.bench.gpt import GPTSize
from zerofold.bench.machine import choose_device, describe_software
from zerofold.bench.mixed import BATCHES, SIZES, UNTIMED_STEPS
from zerofold.bench.offload_engines import OFFLOAD_ENGINES
from zerofold.bench.offload_rows import REFERENCE, Measurement, Run, make_row
from zerofold.bench.offload_table import print_tables
from zerofold.bench.offload_worker import OffloadTask
from zerofold.observe.output import make_folder_of

DEFAULT_RUNS = "plain,fsdp2_cpu,ds2_cpu,ds3_cpu,zf3,zf3_opt,zf3_opt@1e9,zf3_opt@1e-3,zf3_all,zf3_auto"
HEAD_WIDTH = 128
LARGE_SEQ, LARGE_BATCH, LARGE_STEPS = 1024, 1, 3
DIFFERENT_BATCHES = 8
LARGE_PARAMETERS = {"cuda": 20e9, "cpu": 1e6}


def parse_runs(text: str, clip: float) -> list[Run]:
    """ "plain,zf3_opt@1e9": engines, each with the common clip or its own.

    >>> parse_runs("zf3_opt@1e9", 1.0)
    [Run(label='zf3_opt@1e9', engine='zf3_opt', clip=1000000000.0)]
    """
    runs = []
    for label in dict.fromkeys(part.strip() for part in text.split(",") if part.strip()):
        engine, _, own_clip = label.partition("@")
        if engine not in OFFLOAD_ENGINES:
            raise ValueError(f"there is no engine {engine!r}; the engines are {', '.join(OFFLOAD_ENGINES)}")
        try:
            chosen = float(own_clip) if own_clip else clip
        except ValueError:
            raise ValueError(f"--engines {label}: {own_clip!r} is no number to clip at; write {engine}@0.5") from None
        if not chosen > 0:
            raise ValueError(f"--engines {label}: the clip must be above 0, not {chosen:g}")
        runs.append(Run(label, engine, chosen))
    if not runs:
        raise ValueError("--engines names no engine")
    return runs


def size_for(parameters: float, *, vocab: int, seq: int) -> GPTSize:
    """A GPT of at least so many parameters, about 128 times as wide as it is deep.

    >>> size_for(20e9, vocab=32768, seq=1024)
    GPTSize(vocab=32768, width=6144, layers=44, heads=48, seq=1024)
    """
    grain = 1024 if parameters > 1e9 else 64  # widths that matrix units like, where there is a choice
    width = max(grain, round((parameters * 128 / 12) ** (1 / 3) / grain) * grain)
    one, two = (
        GPTSize(vocab=vocab, width=width, layers=layers, heads=max(1, width // HEAD_WIDTH), seq=seq)
        for layers in (1, 2)
    )
    missing = parameters - one.parameters
    layers = 1 + max(0, -int(-missing // (two.parameters - one.parameters)))
    return GPTSize(vocab=vocab, width=width, layers=layers, heads=one.heads, seq=seq)


def task_of(run: Run, common: OffloadTask, large: OffloadTask) -> OffloadTask:
    """What one run is to do, of the two sizes of model."""
    engine = OFFLOAD_ENGINES[run.engine]
    task = replace(large if engine.is_large else common, engine=run.engine, clip=run.clip)
    return task if engine.tries_ways else replace(task, untimed=min(task.untimed, UNTIMED_STEPS))


def measure_run(label: str, task: OffloadTask, measurement: Measurement, *, timeout: float) -> None:
    """One engine in a new process, and in a new folder that goes with it. A failure is noted."""
    environment = {
        # DeepSpeed reads these, whether or not the process group exists.
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "DS_ACCELERATOR": task.device,
        # The host's name may not resolve to an address that gloo can bind to.
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }
    started = time.time()
    folder = tempfile.mkdtemp(prefix="zerofold-bench-", dir=task.path)
    try:
        measurement.rounds[-1][label] = run_alone(
            "zerofold.bench.offload_worker:measure",
            replace(task, path=folder),
            timeout=timeout,
            environment=environment,
        )
    except AloneError as failure:
        measurement.errors[label] = str(failure)
        forget_broken_builds(started)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # tens of GiB, which the next engine may need


def measure_all(
    tasks: dict[str, OffloadTask],
    *,
    rounds: int,
    timeout: float,
    progress: Callable[[str], None],
    after_run: Callable[[Measurement], None],
) -> Measurement:
    """All rounds. What failed once is not tried again."""
    measurement = Measurement()
    for index in range(rounds):
        measurement.rounds.append({})
        for label in figures.there_and_back(list(tasks), index):
            if label not in measurement.errors:
                progress(f"round {index + 1} of {rounds}: {label}")
                measure_run(label, tasks[label], measurement, timeout=timeout)
                after_run(measurement)
    return measurement


def bench_offload_command(
    engines: Annotated[
        str,
        typer.Option(
            help=f"With commas, from {', '.join(OFFLOAD_ENGINES)}; zf3_opt@1e9 clips at 1e9 instead of at --clip."
        ),
    ] = DEFAULT_RUNS,
    rounds: Annotated[int, typer.Option(min=1, help="Every second one in reverse order.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each engine in a round.")] = 5,
    untimed: Annotated[
        int,
        typer.Option(
            min=1,
            help="Steps before them; zerofold tries ways to share with the device in the first eleven. "
            f"Engines that do the same in every step take {UNTIMED_STEPS} at most.",
        ),
    ] = UNTIMED_STEPS,
    d: Annotated[
        int | None, typer.Option("--d", min=1, help="Width of the model; 3072 on a GPU, 128 on the CPU.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks; 28, or 4.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Vocabulary; 32768, or 512.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens in a sequence; 2048, or 64.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in a step; 8, or 4.")] = None,
    parameters: Annotated[
        float | None, typer.Option(min=1, help="Parameters of zf3_large; 20e9 on a GPU, 1e6 on the CPU.")
    ] = None,
    clip: Annotated[float, typer.Option(help="The largest gradient norm, for every engine.")] = 1.0,
    device_limit: Annotated[float, typer.Option(min=0.01, help="GiB of the GPU that zf3_auto may use.")] = 40,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder for states on disk, the system's for temporary files if left out; emptied again."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one engine, from its start to its end.")] = 240,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file, after every engine.")] = None,
) -> None:
    """Time a bf16 training step with fp32 AdamW whose states are off the device, and measure all memory it takes.

    "s/step" is the whole window of steps, to the last update, over their number; "median" is of single steps.
    "host B/param" is the peak of the process's resident memory over its start, for each parameter whose optimizer
    states are off the device. zf3_large trains a model of --parameters for three steps on one batch, 1x1024 tokens.

    \b
    Examples:
      zerofold bench offload
      zerofold bench offload --engines plain,ds3_nvme,zf3_nvme --d 2048 --layers 24 --path /mnt/nvme --out result.json
      zerofold bench offload --engines zf3_large --parameters 20e9 --timeout 600
    """
    try:
        runs = parse_runs(engines, clip)
        device = choose_device(device)
        default = SIZES[device]
        width = d or default.width
        size = GPTSize(
            vocab=vocab or default.vocab,
            width=width,
            layers=layers or default.layers,
            heads=max(1, width // HEAD_WIDTH),
            seq=seq or default.seq,
        )
        path = path or Path(tempfile.gettempdir())
        if not path.is_dir():
            raise ValueError(f"--path {path}: there is no such folder; make it first")
        make_folder_of(out)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    common = OffloadTask(
        engine=REFERENCE,
        size=size,
        batch=batch or BATCHES[device],
        clip=clip,
        device=device,
        path=str(path),
        device_limit=round(device_limit * 2**30),
        untimed=untimed,
        timed=steps,
        batches=DIFFERENT_BATCHES,
    )
    large = replace(
        common,
        size=size_for(parameters or LARGE_PARAMETERS[device], vocab=size.vocab, seq=min(size.seq, LARGE_SEQ)),
        batch=LARGE_BATCH,
        untimed=1,
        timed=LARGE_STEPS - 1,
        batches=1,
    )
    tasks = {run.label: task_of(run, common, large) for run in runs}

    def summarise(measurement: Measurement) -> dict[str, Any]:
        return {
            "machine": describe_software(device),
            "model": {"psi": size.parameters, **asdict(size), "batch": common.batch},
            "method": {"rounds": rounds, "steps": steps, "untimed": untimed, "clip": clip},
            "rows": [asdict(make_row(run, tasks[run.label], measurement, clip)) for run in runs],
        }

    def write(measurement: Measurement) -> None:
        """After every engine: a run of many minutes may be stopped, and keeps what it had."""
        if out is not None:
            out.write_text(json.dumps(summarise(measurement), indent=2) + "\n")

    with Console(stderr=True).status("starting") as status:
        measurement = measure_all(tasks, rounds=rounds, timeout=timeout, progress=status.update, after_run=write)
    rows = [make_row(run, tasks[run.label], measurement, clip) for run in runs]
    if as_json:
        typer.echo(json.dumps(summarise(measurement)))
    else:
        title = f"{size.parameters / 1e6:.1f}M parameters, bf16 with fp32 AdamW, {device}, "
        title += f"{common.batch} sequences of {size.seq} tokens, clip {clip:g}, {rounds} rounds of {steps} steps"
        print_tables(Console(), rows, title)
    # A peer may fail; without the reference, or with a row of ours that fails, the run has not done its job.
    if any(row.error and (row.engine == REFERENCE or row.engine.startswith("zf")) for row in rows):
        raise typer.Exit(1)
