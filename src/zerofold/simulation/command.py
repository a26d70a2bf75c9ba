"""`zerofold simulate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from zerofold.bench.gpt import GPTSize
from zerofold.plan.machine import Link, Machine
from zerofold.plan.presets import preset
from zerofold.plan.shape import in_short
from zerofold.plan.wires import Wires
from zerofold.simulation.curves import SCALINGS, check_plot, curve, efficiency, plot
from zerofold.simulation.engines import ENGINES, Training
from zerofold.simulation.models import choose
from zerofold.simulation.quantities import bytes_per_second, counts, seconds
from zerofold.simulation.result import Simulation
from zerofold.simulation.run import DEVICES, World

_WORLDS = "1,8,64,512,4096,32768,100000"
STAGES = ("0", "1", "2", "3", "dp", "hsdp", "hpz")


def simulate_command(
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with a Hugging Face config.json, or module:function that returns a model, which makes a "
            "loss of tokens and targets; else a GPT of these sizes."
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the GPT.")] = 40,
    hidden: Annotated[int, typer.Option(min=1, help="Its width.")] = 2560,
    heads: Annotated[int, typer.Option(min=1, help="Its attention heads.")] = 32,
    vocab: Annotated[int, typer.Option(min=2, help="Its vocabulary.")] = 50304,
    seq: Annotated[int, typer.Option(min=1, help="Tokens in a sample.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a rank; with --scaling strong, of all ranks.")] = 8,
    checkpointing: Annotated[bool, typer.Option(help="Keep inputs of blocks alone, and compute them again.")] = False,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks, of which rank 0 is simulated.")] = 64,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="As the preset has it.")] = None,
    stage: Annotated[str, typer.Option(help=f"One of {', '.join(STAGES)}.")] = "3",
    precision: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    buffer_mib: Annotated[
        int | None,
        typer.Option(min=1, help="MiB of a buffer that gradients are reduced through; else as the engine has it."),
    ] = None,
    overlap: Annotated[bool, typer.Option(help="Communicate while computing.")] = True,
    device: Annotated[
        str, typer.Option(help="meta: sizes and a virtual clock, for any model. cpu, cuda: real memory and time.")
    ] = "meta",
    machine: Annotated[str, typer.Option("--preset", help="The device and its links, by name.")] = "H200",
    latency_inside: Annotated[str | None, typer.Option(help="Of a message in a node: 3us.")] = None,
    rate_inside: Annotated[str | None, typer.Option(help="Of a device's link in its node, each way: 400GB/s.")] = None,
    latency_across: Annotated[str | None, typer.Option(help="Of a message between nodes.")] = None,
    rate_across: Annotated[str | None, typer.Option(help="Of a device's link to other nodes: 400Gb/s.")] = None,
    rings: Annotated[bool, typer.Option(help="Rings across nodes, as many steps as nodes, instead of trees.")] = False,
    engine: Annotated[str, typer.Option(help=f"{', '.join(ENGINES)} or both.")] = "zerofold",
    steps: Annotated[int, typer.Option(min=1, help="Steps to take the median of, where time really passes.")] = 3,
    scaling: Annotated[
        str | None, typer.Option(help="weak: --batch samples a rank. strong: --batch samples in all.")
    ] = None,
    worlds: Annotated[
        str | None, typer.Option(help=f"With --scaling: numbers of ranks of the curve; {_WORLDS}.", show_default=False)
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="With --scaling: draw the curve, FILE.png or FILE.svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Train a step as rank 0 of any number of ranks, in one process, on wires whose time is modelled.

    The schedule is the real one. On the meta device nothing is computed: kernels take the time that a model of the
    device gives them, and memory is counted. On a GPU kernels are real, and only the wires are modelled.

    \b
    Examples:
      zerofold simulate --checkpointing --world-size 64
      zerofold simulate --model llama-70b/ --checkpointing --batch 1 --world-size 1024
      zerofold simulate --scaling weak --checkpointing --worlds 8,64,4096,100000 --plot weak.svg
      zerofold simulate --device cuda --engine both --world-size 64 --rate-across 400Gb/s --checkpointing
    """
    try:
        fleet = preset(machine, devices=world_size, per_node=gpus_per_node)
        wires = Wires(
            inside=_link("inside", fleet.inside, rate_inside, latency_inside),
            across=_link("across", fleet.across, rate_across, latency_across),
            per_node=fleet.per_node,
            steps="ring" if rings else "tree",
        )
        _check(stage, precision, device, engine, scaling)
        for option, given in (("--worlds", worlds), ("--plot", plot_file)):
            if given is not None and scaling is None:
                raise ValueError(f"{option} {given} is of a curve over numbers of ranks; add --scaling weak or strong")
        if plot_file is not None:
            check_plot(plot_file)
        size = GPTSize(vocab=vocab, width=hidden, layers=layers, heads=heads, seq=seq)
        found = choose(model, size, checkpointing=checkpointing)
        engines = list(ENGINES) if engine == "both" else [engine]

        def training(samples: int) -> Training:
            return Training(
                name=found.name,
                build=found.build,
                loss=found.loss(samples),
                batch=samples,
                units=found.units,
                stage=stage,
                precision=precision,
                overlap=overlap,
                buffer_bytes=None if buffer_mib is None else buffer_mib << 20,
            )

        here = World(size=world_size, wires=wires, machine=fleet, device=device)
        sizes = [world_size] if scaling is None else counts("--worlds", worlds or _WORLDS)
        points: list[Simulation] = []
        with Console(stderr=True).status("building") as status:
            for name in engines:
                for rank_count in sizes:
                    status.update(f"{name}, {rank_count} ranks")
                    points += curve(
                        training, here, [rank_count], scaling=scaling or "weak", batch=batch, engine=name, steps=steps
                    )
        if plot_file is not None:
            plot(points, plot_file, scaling=scaling or "weak")
    except (ValueError, ModuleNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(_summary(points, fleet, wires, scaling)))
    else:
        _print(Console(), points)


def _check(stage: str, precision: str, device: str, engine: str, scaling: str | None) -> None:
    known = {
        "--stage": (stage, STAGES),
        "--precision": (precision, ("bf16", "fp16", "fp32")),
        "--device": (device, DEVICES),
        "--engine": (engine, (*ENGINES, "both")),
        "--scaling": (scaling or "weak", SCALINGS),
    }
    for option, (value, choices) in known.items():
        if value not in choices:
            raise ValueError(f"{option} {value!r}: choose one of {', '.join(choices)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but this machine has no GPU that torch can use; use --device meta")
    if device == "meta" and engine != "zerofold":
        raise ValueError(f"--engine {engine}: FSDP2 does not run on the meta device; use --device cuda, or cpu")


def _link(where: str, link: Link, rate: str | None, latency: str | None) -> Link:
    found = link if rate is None else replace(link, rate=bytes_per_second(f"--rate-{where}", rate))
    return found if latency is None else replace(found, latency=seconds(f"--latency-{where}", latency))


def _summary(points: list[Simulation], fleet: Machine, wires: Wires, scaling: str | None) -> dict[str, Any]:
    return {
        "simulated": True,
        "torch": torch.__version__,
        "preset": fleet.name,
        "wires": {
            "inside": {"rate": wires.inside.rate, "latency": wires.inside.latency},
            "across": {"rate": wires.across.rate, "latency": wires.across.latency},
            "per_node": wires.per_node,
            "steps": wires.steps,
        },
        "scaling": scaling,
        "points": [{**point.to_dict(), "efficiency": efficiency(_same(points, point), point)} for point in points],
    }


def _same(points: list[Simulation], point: Simulation) -> list[Simulation]:
    return [each for each in points if each.engine == point.engine]


def _print(console: Console, points: list[Simulation]) -> None:
    first = points[0]
    title = f"{first.model}, {in_short(first.parameters, 4)} parameters, stage {first.stage}, rank 0, simulated"
    title += f" ({first.clock} clock)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("\nengine", no_wrap=True)
    for heading in ("\nranks", "step\nms", "compute\nms", "exposed\nms", "over-\nlap %", "effi-\nciency", "peak\nGiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        peak = "" if point.peak_bytes is None else f"{point.peak_bytes / 2**30:.1f}"
        table.add_row(
            point.engine,
            f"{point.world:,}",
            f"{1e3 * point.step_seconds:.1f}",
            f"{1e3 * point.compute_seconds:.1f}",
            f"{1e3 * point.exposed_seconds:.1f}",
            "–" if point.overlap is None else f"{100 * point.overlap:.1f}",  # noqa: RUF001
            f"{efficiency(_same(points, point), point):.3f}",
            peak + ("" if point.fits is not False else " !"),
        )
    console.print(table)
    if any(point.fits is False for point in points):
        console.print("! more than the device has")
    if len(points) <= len(ENGINES):
        for point in points:
            console.print(f"{point.engine}: by collective", highlight=False)
            for operation, sent in point.sent_bytes.items():
                occupied = point.wire_seconds.get(operation, 0.0)
                line = f"  {operation:15}{sent / 1e9:9.3f} GB sent,{1e3 * occupied:8.1f} ms on the wire"
                if point.exposed:
                    line += f",{1e3 * point.exposed.get(operation, 0.0):8.1f} ms exposed"
                console.print(line, highlight=False)
    for note in dict.fromkeys(note for point in points for note in point.notes):
        console.print(note, highlight=False)
