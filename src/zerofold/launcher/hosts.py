"""Which slots of which hosts: the hostfile, --include and --exclude, in DeepSpeed's format.

A slot is a place for one rank: a GPU by its number, or on a host without GPUs just a process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

Slots = dict[str, list[int]]
# Open MPI's files say more about a host, such as max_slots.
LINE = re.compile(r"(?P<host>\S+)\s+slots\s*=\s*(?P<slots>\d+)(\s.*|#.*)?")


class BadHosts(ValueError):
    """The hosts asked for make no sense; the message is one line for the user."""


def read_hostfile(path: Path) -> Slots:
    """
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     print("a slots=2", "b slots=4  # new", sep="\\n", file=file, flush=True)
    ...     read_hostfile(Path(file.name))
    {'a': [0, 1], 'b': [0, 1, 2, 3]}
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadHosts(f"--hostfile {path} cannot be read: {error}") from error
    hosts: Slots = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        found = LINE.fullmatch(text)
        if found is None:
            raise BadHosts(f'{path}:{number}: "{text}" is no host: write "name slots=4"')
        name, count = found["host"], int(found["slots"])
        if count < 1:
            raise BadHosts(f"{path}:{number}: {name} has slots=0: give at least 1, or put a # before the line")
        if name in hosts:
            raise BadHosts(f"{path}:{number}: {name} is named a second time: write one line with all its slots")
        hosts[name] = list(range(count))
    if not hosts:
        raise BadHosts(f'{path} names no host: write lines such as "name slots=4"')
    return hosts


def choose(
    hosts: Mapping[str, list[int]],
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_slots: int | None = None,
) -> Slots:
    """The slots to use, hosts in the order given.

    >>> known = {"a": [0, 1], "b": [0, 1, 2, 3]}
    >>> choose(known, include="a@b:0,2")
    {'a': [0, 1], 'b': [0, 2]}
    >>> choose(known, exclude="a@b:3")
    {'b': [0, 1, 2]}
    >>> choose(known, num_nodes=1, num_slots=1)
    {'a': [0]}
    """
    if include and exclude:
        raise BadHosts("--include and --exclude together: give one of them")
    if (include or exclude) and (num_nodes is not None or num_slots is not None):
        raise BadHosts(
            f"{'--include' if include else '--exclude'} together with --num_nodes or --num_gpus: give one or the other"
        )
    if include:
        return _included(hosts, _parse("--include", include, hosts))
    if exclude:
        return _without(hosts, _parse("--exclude", exclude, hosts), exclude)
    return _first(hosts, num_nodes, num_slots)


def _included(hosts: Mapping[str, list[int]], wanted: Slots) -> Slots:
    return {host: wanted[host] or list(slots) for host, slots in hosts.items() if host in wanted}


def _without(hosts: Mapping[str, list[int]], unwanted: Slots, text: str) -> Slots:
    left: Slots = {}
    for host, slots in hosts.items():
        gone = unwanted.get(host)
        kept = list(slots) if gone is None else [slot for slot in slots if gone and slot not in gone]
        if kept:
            left[host] = kept
    if not left:
        raise BadHosts(f"--exclude {text} leaves no slot: the hosts are {_told(hosts)}")
    return left


def _first(hosts: Mapping[str, list[int]], num_nodes: int | None, num_slots: int | None) -> Slots:
    if num_nodes is not None and not 1 <= num_nodes <= len(hosts):
        raise BadHosts(f"--num_nodes {num_nodes}: there are {len(hosts)}: {_told(hosts)}; name hosts in a --hostfile")
    chosen = dict(list(hosts.items())[:num_nodes])
    if num_slots is None:
        return {host: list(slots) for host, slots in chosen.items()}
    if num_slots < 1:
        raise BadHosts(f"--num_gpus {num_slots}: use 1 or more")
    for host, slots in chosen.items():
        if num_slots > len(slots):
            raise BadHosts(f"--num_gpus {num_slots}: {host} has {len(slots)}: use 1 to {len(slots)}")
    return {host: list(slots)[:num_slots] for host, slots in chosen.items()}


def _parse(option: str, text: str, hosts: Mapping[str, list[int]]) -> Slots:
    """Host to slots; an empty list stands for all of them."""
    wanted: Slots = {}
    for part in text.split("@"):
        host, colon, numbers = part.strip().partition(":")
        if host not in hosts:
            raise BadHosts(f'{option} {text}: there is no host "{host}", there are {_told(hosts)}')
        if colon and not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise BadHosts(f'{option} {text}: "{numbers}" are no slots of {host}: write {host}:0,1')
        slots = sorted({int(number) for number in numbers.split(",")}) if colon else []
        missing = [str(slot) for slot in slots if slot not in hosts[host]]
        if missing:
            raise BadHosts(f"{option} {text}: {host} has no slot {', '.join(missing)}, there are {_told(hosts)}")
        before = wanted.get(host, slots)
        wanted[host] = sorted({*before, *slots}) if before and slots else []
    return wanted


def _told(hosts: Mapping[str, list[int]]) -> str:
    """
    >>> _told({"a": [0, 1], "b": [0]})
    'a:0,1 b:0'
    """
    return " ".join(f"{host}:{','.join(str(slot) for slot in slots)}" for host, slots in hosts.items())
