"""How a command is started on a host: at once, by ssh, by Slurm's srun, or by a template of the user's."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# No prompts, nobody could answer them for a hundred hosts: a new host key is accepted, one that changed is refused.
SSH = "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=20 -o ServerAliveInterval=30"
# A step of its own per host, beside the one that this command may run in, with all of the host's cores and GPUs.
SRUN = "srun --nodes=1 --ntasks=1 --nodelist={host} --overlap --cpu-bind=none --kill-on-bad-exit=1 --unbuffered"
# These join their words for a shell on the other side, which takes them apart again.
JOINING = frozenset({"ssh", "rsh", "autossh", "gsissh", "pdsh", "sshpass"})


class BadShell(ValueError):
    """The way to other hosts makes no sense; the message is one line for the user."""


def ssh_template(port: int | None = None, arguments: str = "") -> str:
    """
    >>> ssh_template(2222).endswith("-p 2222 {host}")
    True
    """
    return " ".join([SSH, *([f"-p {port}"] if port else []), *([arguments] if arguments else []), "{host}"])


def srun_template(arguments: str = "") -> str:
    return f"{SRUN} {arguments}".strip()


def on_host(template: str, host: str, command: Sequence[str]) -> list[str]:
    """The words that run `command` on `host`. `{host}` stands for the host and `{command}` for the command as one
    word for a shell; without `{command}` its words follow the template.

    >>> on_host("ip netns exec {host}", "a", ["echo", "a b"])
    ['ip', 'netns', 'exec', 'a', 'echo', 'a b']
    >>> on_host("ssh {host}", "a", ["echo", "a b"])
    ['ssh', 'a', 'echo', "'a b'"]
    >>> on_host("docker exec -i {host} bash -lc {command}", "a", ["echo", "a b"])
    ['docker', 'exec', '-i', 'a', 'bash', '-lc', "echo 'a b'"]
    """
    words = split_template(template)
    quoted = shlex.join(command)
    filled = [word.replace("{host}", host).replace("{command}", quoted) for word in words]
    if any("{command}" in word for word in words):
        return filled
    if Path(words[0]).name in JOINING:
        return [*filled, *(shlex.quote(word) for word in command)]
    return [*filled, *command]


def split_template(template: str) -> list[str]:
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise BadShell(f"--remote-shell {template}: {error}: close the quote") from error
    if not any("{host}" in word for word in words):
        raise BadShell(f'--remote-shell {template}: no {{host}} in it: write for example "ssh {{host}}"')
    return words


def agent_command(python_path: str) -> list[str]:
    """The agent, with this Python and what it needs to find zerofold; everything else comes through its input."""
    # torch's warnings about sockets (a name that does not resolve, a store that has ended) concern no user.
    variables = ["TORCH_CPP_LOG_LEVEL=ERROR", *([f"PYTHONPATH={python_path}"] if python_path else [])]
    # -P: a file or folder called zerofold where the shell happens to begin is not imported.
    return ["env", *variables, sys.executable, "-P", "-m", "zerofold.launcher.agent"]


def is_this_host(name: str) -> bool:
    """
    >>> is_this_host("localhost"), is_this_host("worker-17.example")
    (True, False)
    """
    return name in {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}


def inside_slurm(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is a Slurm job of several nodes."""
    return int(environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or 1) > 1


def slurm_hosts(environment: Mapping[str, str] = os.environ) -> list[str]:
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not nodes:
        raise BadShell("--launcher slurm: SLURM_JOB_NODELIST is not set: start it inside salloc or sbatch")
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        raise BadShell(
            "this is one of several tasks of srun: call zerofold launch once, from the batch script itself, "
            "or give every task --no_ssh --node_rank $SLURM_NODEID --master_addr"
        )
    try:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip()
        raise BadShell(f"scontrol show hostnames {nodes} failed: {told}: give a --hostfile instead") from error
    return answer.stdout.split()
