"""`zerofold plan`: what a training run takes, before it is started."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from zerofold.observe.output import make_folder_of
from zerofold.offload.wishes import read_size
from zerofold.plan.call import DEFAULT_PRESET, plan
from zerofold.plan.machine import GB, Link, Machine
from zerofold.plan.measure import this_machine
from zerofold.plan.pipelining import SCHEDULES
from zerofold.plan.presets import changed, preset, preset_names
from zerofold.plan.result import Plan
from zerofold.plan.sliders import sliders_of_plan, write_plan_page

_NARROWEST, _WIDEST = 80, 100  # columns
_LEAST_MEMORY = 2**24
_PRESETS = ", ".join(preset_names())


def plan_command(
    context: typer.Context,
    params: Annotated[float | None, typer.Option(help="Number of parameters; a GPT of usual proportions.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks of a GPT.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Its width.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Its attention heads.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Its vocabulary; 50304.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample; 2048, or what the model allows.")] = None,
    model: Annotated[str | None, typer.Option(help="A Hugging Face folder, or a config.json.")] = None,
    function: Annotated[
        str | None,
        typer.Option(
            help="module:function that returns the model, or the model and an example: a function of the batch size "
            "that returns forward's arguments as a dict."
        ),
    ] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="N: devices; 1, or those of this machine.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Devices of a node; the preset's.")] = None,
    group: Annotated[int, typer.Option(min=0, help="Ranks in a group of hsdp and hpz; those of a node.")] = 0,
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples of a rank in one forward.")] = 1,
    accumulate: Annotated[int, typer.Option(min=1, help="Backwards that make a step.")] = 1,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a step over all ranks; chooses the two above for every row.")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="Keep the input of every k-th block for backward; 0 keeps everything.")
    ] = 1,
    keep: Annotated[
        str, typer.Option(help="Where those inputs wait for backward.", metavar="device|host|nvme")
    ] = "device",
    partition: Annotated[
        bool, typer.Option("--partition", help="P_a: each tensor-parallel rank keeps its part of those inputs.")
    ] = False,
    tensor: Annotated[int, typer.Option(min=1, help="T: devices that share the inside of every layer.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="They share norms too, along the sequence.")
    ] = False,
    loss_parallel: Annotated[
        bool, typer.Option("--loss-parallel", help="They share logits too, over the vocabulary.")
    ] = False,
    pipeline: Annotated[
        int, typer.Option(min=1, help="P: stages that follow each other; --accumulate are its micro-batches.")
    ] = 1,
    schedule: Annotated[str, typer.Option(help=f"Of the pipeline: {', '.join(SCHEDULES)}.")] = "1f1b",
    chunks: Annotated[
        int,
        typer.Option(
            min=0, help="Runs of blocks on a device, with interleaved (2) and zero_bubble (1); 0: the schedule's own."
        ),
    ] = 0,
    contiguous_gradients: Annotated[
        bool,
        typer.Option("--contiguous-gradients", help="M_d: gradients in one block, there before the first forward."),
    ] = False,
    contiguous_checkpoints: Annotated[
        bool,
        typer.Option("--contiguous-checkpoints", help="M_d: inputs that wait on the device in one block, which stays."),
    ] = False,
    precision: Annotated[str, typer.Option(help="bf16, fp16, fp32 or tf32.")] = "bf16",
    flash: Annotated[bool, typer.Option(help="Attention's weights are computed again in backward, not kept.")] = True,
    machine: Annotated[
        str | None, typer.Option("--preset", help=f"Devices by name: {_PRESETS}; {DEFAULT_PRESET}.")
    ] = None,
    measured: Annotated[
        bool, typer.Option("--this-machine", help="Measure this machine instead; takes a few seconds.")
    ] = False,
    run: Annotated[
        bool,
        typer.Option("--run", help="With --this-machine: take steps of --model or --function, to time the host."),
    ] = False,
    path: Annotated[str | None, typer.Option(help="With --this-machine: a folder whose disk to measure.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Of one device, such as 80GiB.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Of a node, such as 1TB.")] = None,
    disk: Annotated[str | None, typer.Option(help="Of a node, such as 4TB.")] = None,
    link_inside: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s each way between devices of a node.")
    ] = None,
    link_across: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s each way between nodes, for one device.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the bars of every row and sliders.")] = None,
    config: Annotated[Path | None, typer.Option(help="Write the recommended ds_config.json to this file.")] = None,
) -> None:
    """Predict what every ZeRO stage takes on each device, what it sends and how long a step lasts, and choose one.

    The model is a number of parameters, the numbers of a GPT, a Hugging Face config, or a Python function; no weights
    are read. The exit code is 0 also where nothing fits: "recommended" is null then.

    \b
    Examples:
      zerofold plan --params 7.5e9 --world-size 64
      zerofold plan --layers 48 --hidden 1600 --heads 25 --preset V100-32 --world-size 16 --json
      zerofold plan --params 70e9 --world-size 64 --tensor 8 --pipeline 2 --accumulate 16 --preset H100
      zerofold plan --model meta-llama/ --seq 4096 --preset H100 --world-size 8 --config ds_config.json
      zerofold plan --function my_models:build --this-machine --run
    """
    try:
        if measured and machine is not None:
            raise ValueError(f"--preset {machine} and --this-machine are two machines; leave one of them out")
        name = DEFAULT_PRESET if machine is None else machine
        fleet = _fleet(name, measured, path, world_size, link_inside, link_across)
        make_folder_of(html, "--html")
        make_folder_of(config, "--config")
        found = plan(
            model,
            params=params,
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocab=vocab,
            seq=seq,
            function=function,
            machine=fleet,
            world_size=world_size,
            gpus_per_node=gpus_per_node,
            micro_batch=micro_batch,
            accumulate=accumulate,
            global_batch=global_batch,
            checkpoint_every=checkpoint_every,
            keep=keep,
            partition=partition,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            pipeline=pipeline,
            schedule=schedule,
            chunks=chunks,
            precision=precision,
            contiguous_gradients=contiguous_gradients,
            contiguous_checkpoints=contiguous_checkpoints,
            flash=flash,
            group=group,
            device_memory=_size("--device-memory", device_memory),
            host_memory=_size("--host-memory", host_memory),
            disk=_size("--disk", disk),
            run=run,
        )
        if config is not None and found.recommended is None:
            raise ValueError(f"nothing fits, so there is no config to write to {config}: {found.advice.sentences[0]}")
    except ValueError as error:
        typer.echo(f"error: {as_options(str(error), _ARGUMENTS)}", err=True)
        raise typer.Exit(2) from None
    with _writing("--html", html):
        if html is not None:
            write_plan_page(found, html, command=_asked_anew(context, found))
    with _writing("--config", config):
        if config is not None:
            config.write_text(json.dumps(found.ds_config, indent=2) + "\n")
    if config is not None and found.ds_config_note:
        typer.echo(f"{config}: {found.ds_config_note}", err=True)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        columns = shutil.get_terminal_size((_WIDEST, 24)).columns
        typer.echo(found.text(width=max(_NARROWEST, min(_WIDEST, columns))), nl=False)


@contextmanager
def _writing(option: str, file: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        typer.echo(f"error: {option} {file} cannot be written ({error.strerror}): name another", err=True)
        raise typer.Exit(2) from None


_MOVED = {"world_size": "devices", "micro_batch": "batch", "seq": "sequence"}
"""Options that are sliders of the page."""
_ELSEWHERE = ("html", "config", "as_json")


def _asked_anew(context: typer.Context, found: Plan) -> str:
    """The command line for other values of the page's sliders, whose names stand in their places."""
    sliders = {slider.name for slider in sliders_of_plan(found)}
    said, point = ["zerofold", "plan"], (found.recommended or found.stages[0]).point
    moved = {name: slider for name, slider in _MOVED.items() if slider in sliders}
    for option in context.command.params:
        name, value = option.name or "", context.params.get(option.name or "")
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in moved or name in _ELSEWHERE:
            continue
        if name == "global_batch":  # the page compares rows at one batch
            said += ["--accumulate", str(point.accumulate)]
        elif isinstance(value, bool):
            said.append(option.opts[0] if value else option.secondary_opts[0])
        else:
            said += [option.opts[0], shlex.quote(f"{value:.17g}" if isinstance(value, float) else str(value))]
    options = {name: f"--{name.replace('_', '-')}" for name in moved}
    return " ".join([*said, *(f"{options[name]} {{{slider}}}" for name, slider in moved.items())])


_ARGUMENTS = {name: f"--{name.replace('_', '-')}" for name in inspect.signature(plan).parameters}
_ARGUMENTS["machine"] = "--preset"


def as_options(message: str, options: Mapping[str, str]) -> str:
    """A message that speaks of arguments, for whoever has given options.

    >>> as_options("keep='nvme' needs disk=, not tensor=2", {"keep": "--keep", "disk": "--disk", "tensor": "--tensor"})
    '--keep nvme needs --disk, not --tensor 2'
    """
    names = "|".join(sorted(options, key=len, reverse=True))
    quoted = re.sub(rf"(?<![\w'\"-])({names})='([^']*)'", r"\1=\2", message).replace("=True", "=")
    return re.sub(
        rf"(?<![\w'\"-])({names})=(?=([^\s,;:)]?))", lambda found: options[found[1]] + (" " if found[2] else ""), quoted
    )


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    found = read_size(option, int(text) if text.isdigit() else text)
    if found < _LEAST_MEMORY and (found or option == "--device-memory"):
        unit = f"; write {text}GB" if text.isdigit() and int(text) else ""
        raise ValueError(f"{option} {text} is {found} bytes, too little for any model{unit}")
    return found


def _fleet(
    name: str,
    measured: bool,
    path: str | None,
    world_size: int | None,
    link_inside: float | None,
    link_across: float | None,
) -> Machine:
    if path is not None and not measured:
        raise ValueError("--path is the disk to measure, so it needs --this-machine")
    found = this_machine(devices=world_size, path=path) if measured else preset(name, devices=world_size or 1)
    return changed(
        found,
        inside=None if link_inside is None else Link(rate=link_inside * GB, latency=found.inside.latency),
        across=None if link_across is None else Link(rate=link_across * GB, latency=found.across.latency),
    )
