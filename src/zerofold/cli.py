"""The `zerofold` command."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from zerofold import __version__


def main() -> None:
    build_app()()


def build_app() -> typer.Typer:
    """All commands. Built when called, so that rank processes, which import this file, do not load them."""
    from zerofold.bench.activation import bench_activation_command
    from zerofold.bench.comm import bench_comm_command
    from zerofold.bench.fragmentation import bench_fragmentation_command
    from zerofold.bench.io import bench_io_command
    from zerofold.bench.memory import bench_memory_command
    from zerofold.bench.mixed import bench_mixed_command
    from zerofold.bench.offload import bench_offload_command
    from zerofold.bench.plan import bench_plan_command
    from zerofold.bench.precision import bench_precision_command
    from zerofold.bench.save import bench_save_command
    from zerofold.bench.step import bench_step_command
    from zerofold.bench.update import bench_update_command
    from zerofold.checkpoint.commands import checkpoint_app
    from zerofold.launcher.command import CONTEXT_SETTINGS, launch_command
    from zerofold.observe.report import report_command
    from zerofold.plan.command import plan_command
    from zerofold.simulation.command import simulate_command
    from zerofold.train.command import train_command
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
    app.command("train", short_help="Train the built-in GPT; no arguments needed.")(train_command)
    app.command("simulate", short_help="Train a step as rank 0 of any number of ranks.")(simulate_command)
    app.command("verify", short_help="Check every stage against torch DDP.")(verify_command)
    app.command("plan", short_help="Predict memory, traffic and time of every stage.")(plan_command)
    app.command("report", short_help="Show a run on one HTML page.")(report_command)
    app.command(
        "launch", short_help="Run a script on many ranks, on one host or more.", context_settings=CONTEXT_SETTINGS
    )(launch_command)
    bench_app = typer.Typer(help="Measure side by side with other engines.", no_args_is_help=True)
    bench_app.command("step", short_help="A step beside DDP, FSDP2 and DeepSpeed.")(bench_step_command)
    bench_app.command("save", short_help="A checkpoint, at once and in the background.")(bench_save_command)
    bench_app.command("update", short_help="AdamW in one pass and in separate passes.")(bench_update_command)
    bench_app.command("mixed", short_help="A bf16 step beside FSDP2 and DeepSpeed.")(bench_mixed_command)
    bench_app.command("comm", short_help="Every collective over sizes.")(bench_comm_command)
    bench_app.command("io", short_help="What bounds offloading: bus, host, disk.")(bench_io_command)
    bench_app.command("memory", short_help="What one rank of 64 holds.")(bench_memory_command)
    bench_app.command("offload", short_help="A step with states off the device.")(bench_offload_command)
    bench_app.command("activation", short_help="Checkpoints on the device and on the host.")(bench_activation_command)
    bench_app.command("fragmentation", short_help="Memory of a run with sequences of many lengths.")(
        bench_fragmentation_command
    )
    bench_app.command("plan", short_help="Predicted beside measured peaks and times.")(bench_plan_command)
    bench_app.command("precision", short_help="Losses in every precision and stage.")(bench_precision_command)
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
