"""What the terminal tells the agent of a host, and the lines in which the two speak.

Both ways one line is one message. Those of an agent begin with a mark, because a remote shell may write its own lines
(a greeting, a warning) into the same stream.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

MARK = "\x1ezerofold "


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every rank runs."""

    kind: str
    """"script", "module" or "program"."""
    target: str
    arguments: list[str] = field(default_factory=list)
    local_rank_argument: bool = False
    """Whether `--local_rank=N` stands before the arguments."""
    bind: bool = False
    cores: list[int] = field(default_factory=list)
    """Those to share out when `bind`; empty: all that the agent may use."""
    as_deepspeed: bool = False


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One host's part of a job.

    >>> plan = HostPlan(host="a", node_rank=0, nodes=1, slots=[0, 1], task=Task(kind="script", target="train.py"))
    >>> HostPlan.from_json(plan.to_json()) == plan
    True
    """

    host: str
    node_rank: int
    nodes: int
    slots: list[int]
    """GPU numbers among those that the host shows; without GPUs only their count matters."""
    task: Task
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0: any free one, on a single host."""
    run_id: str = "zerofold"
    max_restarts: int = 0
    folder: str = "."
    environment: dict[str, str] = field(default_factory=dict)
    grace: float = 5.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HostPlan:
        values = json.loads(text)
        return cls(**{**values, "task": Task(**values["task"])})


def pack(kind: str, **content: Any) -> str:
    """
    >>> unpack(pack("hello", gpus=2))
    {'kind': 'hello', 'gpus': 2}
    """
    return f"{MARK}{json.dumps({'kind': kind, **content})}\n"


def unpack(line: str) -> dict[str, Any] | None:
    """None for a line that no agent wrote."""
    if not line.startswith(MARK):
        return None
    message = json.loads(line.removeprefix(MARK))
    assert isinstance(message, dict)
    return message
