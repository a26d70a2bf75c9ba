"""`zerofold launch`: the options, turned into one plan per host."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from zerofold.launch import default_nproc, usable_cores
from zerofold.launcher.environment import BadVariable, env_files, exported, forwarded
from zerofold.launcher.hosts import BadHosts, Slots, choose, read_hostfile
from zerofold.launcher.job import CannotStart, Job, Meeting
from zerofold.launcher.output import Output
from zerofold.launcher.plan import HostPlan, Task
from zerofold.launcher.remote import (
    BadShell,
    agent_command,
    inside_slurm,
    is_this_host,
    on_host,
    slurm_hosts,
    split_template,
    srun_template,
    ssh_template,
)

BAD_INPUT = 2
HIGHEST_PORT = 65535
DEFAULT_HOSTFILE = Path("/job/hostfile")
# Options stop at the script: what follows is its own. Both --num_gpus and --num-gpus are understood.
CONTEXT_SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda word: word.replace("_", "-"),
}


class BadOption(ValueError):
    """Options that contradict each other; the message is one line for the user."""


def launch_command(
    script: Annotated[str, typer.Argument(help="The script, or with --module a module, with --no_python a program.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="All that follows belongs to the script.", show_default=False)
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            "--num_gpus",
            "--num_accelerators",
            "--nproc",
            help="Ranks on each host; by default every GPU, or 2 where there is none.",
            show_default=False,
        ),
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option("--num_nodes", help="Use the first so many hosts.", show_default=False)
    ] = None,
    include: Annotated[
        str, typer.Option("--include", "-i", help="Only these: host:0,1@host2 (all slots of host2).")
    ] = "",
    exclude: Annotated[str, typer.Option("--exclude", "-e", help="All but these, written in the same way.")] = "",
    hostfile: Annotated[
        Path | None,
        typer.Option(
            "--hostfile",
            "-H",
            help=f'Lines such as "host slots=4"; {DEFAULT_HOSTFILE} if there is one.',
            show_default=False,
        ),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option("--master_addr", help="Address of the first host; found by itself.", show_default=False),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option("--master_port", help="A free port there; any on one host, else 29500.", show_default=False),
    ] = None,
    remote_shell: Annotated[
        str | None,
        typer.Option(
            "--remote-shell",
            help='How to reach a host: "ssh {host}", "ip netns exec {host}", "docker exec -i {host}". The command '
            "follows, or stands where {command} is, as one word. It needs its standard input.",
            show_default=False,
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher", help="ssh or slurm; by default slurm in a job of several nodes.", show_default=False
        ),
    ] = None,
    launcher_args: Annotated[str, typer.Option("--launcher_args", help="More words for ssh or srun.")] = "",
    ssh_port: Annotated[int | None, typer.Option("--ssh_port", help="Port for ssh.", show_default=False)] = None,
    no_ssh: Annotated[
        bool,
        typer.Option("--no_ssh", help="Start this host's ranks alone; call it on every host, with --node_rank."),
    ] = False,
    node_rank: Annotated[
        int | None, typer.Option("--node_rank", help="With --no_ssh: which of the hosts this is.", show_default=False)
    ] = None,
    force_multi: Annotated[bool, typer.Option("--force_multi", help="Use the remote shell for this host too.")] = False,
    export: Annotated[
        list[str] | None,
        typer.Option("--export", help="NAME or NAME=VALUE for all ranks; may be repeated.", show_default=False),
    ] = None,
    module: Annotated[bool, typer.Option("--module", help="Run a module, as python -m does.")] = False,
    no_python: Annotated[bool, typer.Option("--no_python", help="Run a program that is no Python.")] = False,
    bind_cores: Annotated[
        bool,
        typer.Option(
            "--bind-cores", "--bind_cores_to_rank", help="Each rank on its own cores; OMP_NUM_THREADS is their number."
        ),
    ] = False,
    bind_core_list: Annotated[
        str | None, typer.Option("--bind_core_list", help="The cores to share out: 0-3,8-11.", show_default=False)
    ] = None,
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="zerofold stands in for the module name deepspeed in the ranks.")
    ] = False,
    local_rank_arg: Annotated[
        bool | None,
        typer.Option(
            "--local-rank-arg/--no_local_rank",
            help="Add --local_rank=N to the script's arguments, as DeepSpeed does; by default with --as-deepspeed. "
            "LOCAL_RANK is always set.",
            show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", help="Start all ranks again so often when one fails.")
    ] = 0,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            help="Seconds for the ranks to end after Ctrl-C, SIGTERM, or (30 at most) the failure of another one.",
        ),
    ] = 5.0,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            "--enable_each_rank_log",
            help="A file rank-N.log for each rank; rank 0 is shown as well.",
            show_default=False,
        ),
    ] = None,
    only_rank: Annotated[
        str | None, typer.Option("--only-rank", help="Show these ranks alone: 0,3.", show_default=False)
    ] = None,
) -> None:
    """Run a script on many ranks, of this host or of several; torch's elastic agent is underneath.

    Each line that a rank writes has the rank in front. The error of the rank that failed first is shown last, and its
    exit code is that of the command. Ranks have RANK, LOCAL_RANK, WORLD_SIZE and MASTER_* set, as under torchrun.
    GPU numbers count among those that CUDA_VISIBLE_DEVICES shows. Variables such as NCCL_*, HF_* and PYTHONPATH go to
    the other hosts, as do those in .deepspeed_env.

    The standard input of the ranks is empty.

    Example: zerofold launch --num_gpus 2 train.py --deepspeed ds_config.json

    Example: zerofold launch --hostfile hosts --include a@b:0,1 --log-dir logs train.py
    """
    # DeepSpeed's way to leave a number out.
    num_gpus, num_nodes = (None if number == -1 else number for number in (num_gpus, num_nodes))
    try:
        task = Task(
            kind=_kind(script, module=module, no_python=no_python),
            target=script,
            arguments=arguments or [],
            local_rank_argument=as_deepspeed if local_rank_arg is None else local_rank_arg,
            bind=bind_cores or bind_core_list is not None,
            cores=_numbers("--bind_core_list", bind_core_list or ""),
            as_deepspeed=as_deepspeed,
        )
        slurm = _uses_slurm(launcher, remote_shell)
        pool = _pool(hostfile, slurm=slurm, num_gpus=num_gpus, include=include, no_ssh=no_ssh, num_nodes=num_nodes)
        hosts = choose(pool, include=include, exclude=exclude, num_nodes=num_nodes, num_slots=num_gpus)
        _check(hosts, no_ssh, node_rank, master_addr, max_restarts, grace)
        _check_port("--master_port", master_port, lowest=0 if len(hosts) == 1 else 1)
        _check_port("--ssh_port", ssh_port, lowest=1)
        template = remote_shell or (srun_template(launcher_args) if slurm else ssh_template(ssh_port, launcher_args))
        split_template(template)
        variables = {**forwarded(os.environ), **_chosen_variables(export or [], several=len(hosts) > 1)}
        shown = None if only_rank is None else _ranks(only_rank, hosts)
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
    except (BadOption, BadHosts, BadShell, BadVariable, OSError) as error:
        _fail(str(error), BAD_INPUT)
    # Hosts that are started one by one must come to the same name.
    run_id = f"zerofold-{master_addr}-{master_port}" if no_ssh else f"zerofold-{uuid.uuid4().hex[:8]}"
    plans = [
        HostPlan(
            host=host,
            node_rank=number,
            nodes=len(hosts),
            slots=slots,
            task=task,
            run_id=run_id,
            max_restarts=max_restarts,
            folder=os.getcwd(),
            environment=variables,
            grace=grace,
        )
        for number, (host, slots) in enumerate(hosts.items())
        if not no_ssh or number == node_rank
    ]
    through_shell = remote_shell is not None or slurm or force_multi
    commands = {
        plan.host: on_host(template, plan.host, agent_command(_absolute_python_path()))
        for plan in plans
        if not no_ssh and (through_shell or not is_this_host(plan.host))
    }
    output = Output(several_hosts=len(hosts) > 1, only_ranks=shown, log_dir=log_dir)
    try:
        code = Job(output, Meeting(master_addr, master_port)).run(plans, commands)
    except CannotStart as error:
        _fail(str(error), 1)
    raise typer.Exit(code)


def _kind(script: str, *, module: bool, no_python: bool) -> str:
    if module and no_python:
        raise BadOption("--module and --no_python together: a module is Python: give one of them")
    if not module and not no_python and not Path(script).is_file():
        raise BadOption(f"{script} is no file: name a script, or a module with --module")
    return "module" if module else "program" if no_python else "script"


def _chosen_variables(export: list[str], *, several: bool) -> dict[str, str]:
    """What the user wants set, besides what goes to other hosts by itself; the files as with DeepSpeed's launcher."""
    from_files = env_files(Path.home(), Path.cwd()) if several else {}
    return {**from_files, **exported(export, os.environ)}


def _absolute_python_path() -> str:
    """A remote shell begins in another folder, where a relative path leads nowhere."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(os.path.abspath(path) for path in paths)


def _uses_slurm(launcher: str | None, remote_shell: str | None) -> bool:
    if launcher is None:
        return remote_shell is None and inside_slurm()
    name = launcher.lower()
    if name not in ("ssh", "pdsh", "slurm"):
        raise BadOption(f"--launcher {launcher}: use ssh or slurm, or describe another one with --remote-shell")
    if remote_shell is not None:
        raise BadOption(f"--launcher {launcher} and --remote-shell together: give one of them")
    return name == "slurm"


def _pool(
    hostfile: Path | None, *, slurm: bool, num_gpus: int | None, include: str, no_ssh: bool, num_nodes: int | None
) -> Slots:
    """All hosts and slots there are to choose from."""
    if hostfile is None and DEFAULT_HOSTFILE.is_file():
        typer.echo(f"zerofold launch: the hosts are those of {DEFAULT_HOSTFILE}", err=True)
        hostfile = DEFAULT_HOSTFILE
    if hostfile is not None:
        return read_hostfile(hostfile)
    gpus = torch.cuda.device_count()
    if gpus:
        slots = gpus
    elif num_gpus is not None:
        slots = num_gpus
    else:
        # Without GPUs a slot is just a process: who names them has as many as there are cores.
        slots = max(default_nproc("cpu"), usable_cores() if include else 0)
    if no_ssh:
        return {f"node-{number}": list(range(slots)) for number in range(num_nodes or 1)}
    names = slurm_hosts() if slurm else ["localhost"]
    if slurm and num_gpus is None and (on_node := os.environ.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        slots = int(on_node)
    return {name: list(range(slots)) for name in names}


def _check(
    hosts: Slots, no_ssh: bool, node_rank: int | None, master_addr: str | None, max_restarts: int, grace: float
) -> None:
    if no_ssh:
        if node_rank is None or not 0 <= node_rank < len(hosts):
            raise BadOption(f"--no_ssh needs --node_rank 0 to {len(hosts) - 1}, not {node_rank}")
        if master_addr is None and len(hosts) > 1:
            raise BadOption("--no_ssh on several hosts needs --master_addr, the address of the first one")
    elif node_rank is not None:
        raise BadOption(f"--node_rank {node_rank} without --no_ssh: leave it out, or start every host's ranks yourself")
    if max_restarts < 0:
        raise BadOption(f"--max-restarts {max_restarts}: use 0 or more")
    if grace < 0:
        raise BadOption(f"--grace {grace:g}: use 0 or more seconds")


def _numbers(option: str, text: str) -> list[int]:
    """
    >>> _numbers("--bind_core_list", "0-2,5")
    [0, 1, 2, 5]
    """
    numbers: list[int] = []
    for part in text.split(",") if text else []:
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or int(high or low) < int(low):
            raise BadOption(f'{option} {text}: "{part}" is no number or range: write 0-3,8')
        numbers += range(int(low), int(high or low) + 1)
    return numbers


def _ranks(text: str, hosts: Slots) -> list[int]:
    ranks, world = _numbers("--only-rank", text), sum(len(slots) for slots in hosts.values())
    missing = [rank for rank in ranks if rank >= world]
    if missing or not ranks:
        fault = f"there is no rank {missing[0]}" if missing else "it names no rank"
        raise BadOption(f"--only-rank {text}: {fault}: use 0 to {world - 1}")
    return ranks


def _check_port(option: str, port: int | None, *, lowest: int) -> None:
    if port is not None and not lowest <= port <= HIGHEST_PORT:
        raise BadOption(f"{option} {port}: use {lowest} to {HIGHEST_PORT}")


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"zerofold launch: {message}", err=True)
    raise typer.Exit(code)
