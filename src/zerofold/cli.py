"""The `zerofold` command."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console

from zerofold import __version__
from zerofold.launch import RankFailed, default_nproc, init_ranks, run_ranks
from zerofold.train.gpt import GPTConfig
from zerofold.train.loop import train
from zerofold.train.options import DEFAULT_STEPS, TrainOptions

BAD_INPUT = 2
INTERRUPTED = 130


def main() -> None:
    build_app()()


def build_app() -> typer.Typer:
    """All commands. Built when called, so that rank processes, which import this file, do not load them."""
    from zerofold.bench.memory import bench_memory_command
    from zerofold.bench.mixed import bench_mixed_command
    from zerofold.bench.precision import bench_precision_command
    from zerofold.bench.save import bench_save_command
    from zerofold.bench.step import bench_step_command
    from zerofold.bench.update import bench_update_command
    from zerofold.checkpoint.commands import checkpoint_app
    from zerofold.verify import verify_command

    app = typer.Typer(
        name="zerofold",
        help="Train models whose states do not fit one device, on plain PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_global_options)
    app.command("train")(train_command)
    app.command("verify")(verify_command)
    bench_app = typer.Typer(help="Measure side by side with other engines.", no_args_is_help=True)
    bench_app.command("step")(bench_step_command)
    bench_app.command("save")(bench_save_command)
    bench_app.command("update")(bench_update_command)
    bench_app.command("mixed")(bench_mixed_command)
    bench_app.command("memory")(bench_memory_command)
    bench_app.command("precision")(bench_precision_command)
    app.add_typer(bench_app, name="bench")
    app.add_typer(checkpoint_app(), name="checkpoint")
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zerofold {__version__}, torch {torch.__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop."),
    ] = False,
) -> None:
    """Train models whose states do not fit one device, on plain PyTorch."""


def train_command(
    nproc: Annotated[
        int | None, typer.Option(help="Processes; by default every GPU, or 2 on the CPU.", show_default=False)
    ] = None,
    stage: Annotated[
        int, typer.Option(help="0: nothing is cut; 1: optimizer; 2: and gradients; 3: and parameters.")
    ] = 3,
    precision: Annotated[str, typer.Option(help="fp32, tf32, bf16 or fp16.")] = TrainOptions.precision,
    steps: Annotated[
        int | None,
        typer.Option(help=f"Stop after so many steps; {DEFAULT_STEPS} unless --minutes is given.", show_default=False),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so much time.", show_default=False)] = None,
    batch: Annotated[int, typer.Option(help="Sequences per process and step.")] = TrainOptions.batch,
    seq: Annotated[int, typer.Option(help="Bytes per sequence.")] = GPTConfig.seq,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = GPTConfig.layers,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = GPTConfig.hidden,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = GPTConfig.heads,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = TrainOptions.lr,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = TrainOptions.seed,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; by default runs/ and the time.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPUs if there are any.")] = "auto",
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a progress bar.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    """Train a byte-level GPT on the source of the Python standard library.

    No argument is needed: two processes on the CPU, or one on each GPU, at stage 3.

    \b
    Examples:
      zerofold train
      zerofold train --nproc 4 --stage 2 --minutes 5
      zerofold train --precision bf16
      zerofold train --layers 12 --hidden 768 --heads 12 --seq 512 --lr 6e-4
    """
    try:
        device_type = _device_type(device)
        nproc = _process_count(nproc, device_type)
        options = TrainOptions(
            out=out or Path("runs") / time.strftime("%Y%m%d-%H%M%S"),
            gpt=GPTConfig(layers=layers, hidden=hidden, heads=heads, seq=seq),
            stage=stage,
            precision=precision,
            steps=steps,
            minutes=minutes,
            batch=batch,
            lr=lr,
            seed=seed,
            plain=plain,
        )
    except ValueError as error:
        _fail(str(error), BAD_INPUT)
    try:
        run_ranks(_train_on_rank, nproc, options, device_type, debug=debug)
    except RankFailed as error:
        _fail(str(error) if debug else f"{error} (--debug shows the traceback)", 1)
    except KeyboardInterrupt:
        Console().show_cursor(True)  # the progress bar had no time to give it back
        _fail(f"stopped by you; what was measured is in {options.out}", INTERRUPTED, label="")


def _train_on_rank(options: TrainOptions, device_type: str) -> None:
    with init_ranks(device_type) as (rank, world, device):
        train(options, rank, world, device)


def _device_type(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device {name} is not known: use cpu, cuda or auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU here: use --device cpu")
    return name


def _process_count(wanted: int | None, device_type: str) -> int:
    if wanted is None:
        return default_nproc(device_type)
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
