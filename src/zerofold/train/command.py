"""`zerofold train`: starts the ranks, starts them again when one dies, and says how it ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from zerofold.launch import Grace, RankFailed, Stopped, default_nproc, init_ranks, one_line, run_ranks
from zerofold.placement import ROWS
from zerofold.train.gpt import GPTConfig
from zerofold.train.loop import Result, train
from zerofold.train.options import DEFAULT_BATCH, DEFAULT_STEPS, TrainOptions
from zerofold.train.spread import Degrees

BAD_INPUT = 2
RUNS = Path("runs")
AUTO = "auto"
# Options that say how the job runs here, and nothing about the run.
ABOUT_THE_JOB = frozenset({"nproc", "device", "debug", "max_restarts", "grace", "out", "resume"})
ABOUT_THE_MODEL = frozenset({"layers", "hidden", "heads", "seq"})


def train_command(
    context: typer.Context,
    nproc: Annotated[
        int | None, typer.Option(help="Processes; by default every GPU, or 2 on the CPU.", show_default=False)
    ] = None,
    stage: Annotated[
        str,
        typer.Option(
            help="0: nothing is cut; 1: optimizer; 2: and gradients; 3: and parameters; dp: one process updates; "
            "hsdp: 3 inside groups that repeat each other; hpz: 3 over all, gathered again inside groups.",
            metavar="|".join(ROWS),
        ),
    ] = "3",
    group: Annotated[
        int | None,
        typer.Option(
            help="Data-parallel processes in a group of hsdp and hpz; those of a machine, and on one machine half of "
            "them.",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, tf32, bf16 or fp16.")] = TrainOptions.precision,
    offload: Annotated[
        str | None,
        typer.Option(
            help="Optimizer states off the device: host, nvme, a part of them from 0 to 1 to the host, or auto: what "
            "must, parameters too. A run that goes on keeps its own; device: none from here on.",
            metavar="host|nvme|auto|PART|device",
            show_default=False,
        ),
    ] = None,
    offload_path: Annotated[
        str | None,
        typer.Option(help="Folder on the disk for --offload nvme or auto.", metavar="DIR", show_default=False),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Compute blocks again in backward, so many from one kept input; 0: keep everything.")
    ] = TrainOptions.checkpoint_every,
    keep: Annotated[
        str,
        typer.Option(
            help="Where those inputs wait for backward; nvme: in --offload-path; auto: wherever the plan finds room; "
            "with --global-batch alone it also says how many sequences at a time, the fastest that fits.",
            metavar="device|host|nvme|auto",
        ),
    ] = TrainOptions.keep,
    tensor: Annotated[int, typer.Option(help="Processes that share the inside of every layer.")] = TrainOptions.tensor,
    pipeline: Annotated[
        int, typer.Option(help="Processes that follow each other, each with some of the blocks.")
    ] = TrainOptions.pipeline,
    data: Annotated[
        int | None, typer.Option(help="Processes with other sequences; those that are left.", show_default=False)
    ] = TrainOptions.data,
    steps: Annotated[
        int | None,
        typer.Option(help=f"Stop after so many steps; {DEFAULT_STEPS} unless --minutes is given.", show_default=False),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so much time.", show_default=False)] = None,
    batch: Annotated[
        int | None, typer.Option(help=f"Sequences at a time in a process; {DEFAULT_BATCH}.", show_default=False)
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Batches of a process that make a step; 1.", show_default=False)
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(help="Sequences in a step: batch x data-parallel processes x accumulate.", show_default=False),
    ] = None,
    seq: Annotated[int, typer.Option(help="Bytes per sequence.")] = GPTConfig.seq,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = GPTConfig.layers,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = GPTConfig.hidden,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = GPTConfig.heads,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = TrainOptions.lr,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = TrainOptions.seed,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; by default runs/ and the time.", show_default=False)
    ] = None,
    save_every: Annotated[
        int, typer.Option(help="Steps from one checkpoint to the next; 0: none, not at the end either.")
    ] = TrainOptions.save_every,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on with the run in this folder. auto: with the one in --out, or the newest in runs/; if it has no "
            "checkpoint yet, begin.",
            metavar="RUN|auto",
            show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="Start again so often when a process fails.")] = 0,
    grace: Annotated[float, typer.Option(help="Seconds to finish the step and save after SIGTERM or Ctrl-C.")] = 300,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPUs if there are any.")] = "auto",
    csv: Annotated[bool, typer.Option("--csv", help="Numbers also as files in RUN/csv.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Numbers also for TensorBoard, in RUN/tensorboard.")
    ] = False,
    prometheus: Annotated[
        str | None,
        typer.Option(
            help="Numbers also in this file, for the textfile collector of Prometheus' node_exporter.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(help="Numbers also to this project of Weights & Biases.", metavar="PROJECT", show_default=False),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a progress bar.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    """Train a byte-level GPT on the source of the Python standard library.

    No argument is needed: two processes on the CPU, or one on each GPU, at stage 3.

    SIGTERM or Ctrl-C finishes the step, saves and ends; a second Ctrl-C ends at once. Exit code: 0 when the run is
    complete, 143 after SIGTERM, 130 after Ctrl-C, 2 for options that cannot be, 1 for any other failure.

    \b
    Examples:
      zerofold train
      zerofold train --nproc 4 --stage 2 --minutes 5
      zerofold train --nproc 4 --stage hsdp --group 2
      zerofold train --precision bf16
      zerofold train --offload nvme --offload-path /mnt/nvme
      zerofold train --checkpoint-every 2 --keep host
      zerofold train --tensor 2 --pipeline 2 --data 2 --steps 4
      zerofold train --layers 12 --hidden 768 --heads 12 --seq 512 --lr 6e-4
      zerofold train --resume runs/20260101-120000 --nproc 2
      zerofold train --out run --resume auto --max-restarts 3
      zerofold train --csv --prometheus /var/lib/node_exporter/zerofold.prom
      torchrun --nproc_per_node=4 --max-restarts=3 -m zerofold train --out run --resume auto
    """
    given = {name for name in context.params if name not in ABOUT_THE_JOB and _is_given(context, name)}
    told = _Told(
        values={**context.params, "stage": int(stage) if stage.isdigit() else stage},
        given=given,
        out=out,
        resume=resume,
    )
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        _train_as_rank(told, nproc, device, debug)
        return
    try:
        device_type = _device_type(device)
        options = told.options()
        nproc = _process_count(nproc, device_type, options.degrees)
        options.shares(nproc)
        if max_restarts < 0 or grace <= 0:
            raise ValueError("--max-restarts must be 0 or more, and --grace above 0")
    except ValueError as error:
        _fail(str(error), BAD_INPUT)
    _report(options, _train_with_restarts(options, nproc, device_type, max_restarts, Grace(grace), debug))


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


class _Told:
    """What the command line says about the run."""

    def __init__(self, values: dict[str, Any], given: set[str], out: Path | None, resume: str | None) -> None:
        self.values, self.given, self.out, self.resume = values, given, out, resume

    def options(self) -> TrainOptions:
        run = Path(self.resume) if self.resume not in (None, AUTO) else self.out
        if self.resume == AUTO and run is None:
            run = _newest_run()
        if self.out is not None and run != self.out:
            raise ValueError(f"--resume {run} goes on in its own folder: leave --out {self.out} out")
        if self.resume is not None and run is not None:
            began = TrainOptions(out=run, resume=True)
            if began.last_checkpoint is not None:
                return TrainOptions.of_run(run, {name: self.values[name] for name in self.given})
            if self.resume != AUTO:
                raise ValueError(
                    f"{run} holds no checkpoint to go on from: name a run folder, or begin: --out {run} --resume auto"
                )
        values = {name: value for name, value in self.values.items() if name not in ABOUT_THE_JOB | ABOUT_THE_MODEL}
        gpt = GPTConfig(**{name: self.values[name] for name in ABOUT_THE_MODEL})
        out = run or RUNS / time.strftime("%Y%m%d-%H%M%S")
        return TrainOptions(out=out, gpt=gpt, resume=self.resume is not None, **values)


def _newest_run() -> Path | None:
    found = [run for run in RUNS.glob("*") if TrainOptions(out=run, resume=True).last_checkpoint is not None]
    return max(found, key=lambda run: (run.stat().st_mtime, run.name), default=None)


def _train_with_restarts(
    options: TrainOptions, nproc: int, device_type: str, max_restarts: int, grace: Grace, debug: bool
) -> Result:
    last_failure: tuple[str, Path | None] | None = None
    for restart in range(max_restarts + 1):
        try:
            results: list[Result] = run_ranks(_train_on_rank, nproc, options, device_type, debug=debug, grace=grace)
            if results[0].stopped_by is None:
                return results[0]
            # The ranks were passed SIGTERM, whatever came.
            return replace(results[0], stopped_by=grace.signal_number or results[0].stopped_by)
        except RankFailed as error:
            _give_the_cursor_back()
            failure = (str(error), options.last_checkpoint)
            # What raised, and raises again with no checkpoint in between, will raise every time.
            in_vain = bool(error.trace) and failure == last_failure
            if restart == max_restarts or in_vain:
                shown = str(error) if debug or not error.trace else f"{error} (--debug shows the traceback)"
                _fail(shown + ("; it would not go better the next time" if in_vain else "") + _how_to_go_on(options), 1)
            last_failure = failure
            begin = "the beginning" if failure[1] is None else failure[1].name
            typer.echo(f"{error}. Starting again from {begin} ({restart + 1} of {max_restarts})", err=True)
            options = replace(options, resume=True)
        except Stopped as stopped:
            _give_the_cursor_back()
            _fail(f"stopped: {stopped}{_how_to_go_on(options)}", 128 + stopped.signal_number, label="")
    raise AssertionError("the last attempt returns or fails")


def _train_on_rank(options: TrainOptions, device_type: str) -> Result:
    with init_ranks(device_type) as (rank, world, device):
        return train(options, rank, world, device)


def _train_as_rank(told: _Told, nproc: int | None, device: str, debug: bool) -> None:
    """This process is a rank already: torchrun (or srun) has started it."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 and told.resume is None:
        told.resume = AUTO
    rank = int(os.environ["RANK"])
    try:
        with init_ranks(_device_type(device)) as (_, world, where):
            # Rank 0 looks at folders and at the clock, and the others take its word.
            word: list[Any] = [_options_or_error(told, nproc, world) if rank == 0 else None]
            dist.broadcast_object_list(word, src=0)
            (options,) = word
            if isinstance(options, TrainOptions):
                result = train(options, rank, world, where)
    except Exception as error:
        if debug:
            raise
        _fail(f"rank {rank}: {one_line(error)} (--debug shows the traceback)", 1)
    if not isinstance(options, TrainOptions):
        if rank == 0:
            _fail(options, BAD_INPUT)
        raise typer.Exit(BAD_INPUT)
    _report(options, result, quiet=rank != 0)


def _options_or_error(told: _Told, nproc: int | None, world: int) -> TrainOptions | str:
    try:
        if nproc not in (None, world):
            raise ValueError(f"--nproc {nproc}, but {world} processes were started already: leave it out")
        may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
        if may_restart and told.out is None and told.resume in (None, AUTO):
            raise ValueError("with restarts the run needs a folder that stays the same: name one with --out")
        options = told.options()
        options.shares(world)
    except ValueError as error:
        return str(error)
    return options


def _report(options: TrainOptions, result: Result, *, quiet: bool = False) -> None:
    if result.stopped_by is None:
        return
    of = f" of {options.step_limit}" if options.step_limit else ""
    if not quiet:
        name = "Ctrl-C" if result.stopped_by == signal.SIGINT else signal.Signals(result.stopped_by).name
        typer.echo(f"stopped by {name} after step {result.steps}{of}{_how_to_go_on(options)}", err=True)
    raise typer.Exit(128 + result.stopped_by)


def _how_to_go_on(options: TrainOptions) -> str:
    checkpoint = options.last_checkpoint
    if checkpoint is None:
        return f"; there is no checkpoint, what was measured is in {options.out}"
    return f"; the last checkpoint is {checkpoint}; to go on: zerofold train --resume {options.out}"


def _give_the_cursor_back() -> None:
    if sys.stdout.isatty():
        Console().show_cursor(True)  # the progress bar had no time to


def _device_type(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device {name} is not known: use cpu, cuda or auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU here: use --device cpu")
    return name


def _process_count(wanted: int | None, device_type: str, degrees: Degrees) -> int:
    if wanted is None:
        wanted = degrees.ranks(default_nproc(device_type))
    if wanted < 1:
        raise ValueError(f"--nproc {wanted} is no number of processes: use 1 or more")
    if device_type == "cuda" and wanted > torch.cuda.device_count():
        raise ValueError(
            f"--nproc {wanted} needs as many GPUs, there are {torch.cuda.device_count()}: "
            "use fewer processes, or --device cpu"
        )
    return wanted


def _fail(message: str, code: int, label: str = "error: ") -> NoReturn:
    typer.echo(f"{label}{message}", err=True)
    raise typer.Exit(code)
