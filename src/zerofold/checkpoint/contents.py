"""What a checkpoint holds, whoever wrote it: tensors that can be read in flat ranges, and plain data.

A reader of one format (our own, a Hugging Face folder, DeepSpeed's, torch's) makes `Contents`; loading knows nothing
else. Reading happens only when a range is asked for, so a rank reads what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used; the message names the file and the way out.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64), stage=3)
    >>> try:
    ...     zf.load(model, None, "nowhere")
    ... except zf.CheckpointError as error:
    ...     print(error)
    nowhere does not exist: name the folder that zf.save was given, or another checkpoint
    >>> zf.close(model)
    """


class Stored(Protocol):
    """One whole tensor on disk."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Elements start to stop of the flattened tensor, 1-D, on the CPU, in `dtype`."""
        ...


@dataclass
class OptimizerContents:
    """One optimizer, its parameters by their names in the model."""

    groups: list[dict[str, Any]]  # hyperparameters as plain data; "params" is a list of names
    states: dict[str, dict[str, Stored | Any]]  # by parameter name and state name: a tensor on disk, or a plain value
    kind: str = ""  # the class that wrote it
    others: dict[Any, Any] = field(default_factory=dict)  # what it keeps under no parameter


@dataclass
class Contents:
    """All that was found. What a format does not have stays empty."""

    where: str  # the folder, for messages
    tensors: dict[str, Stored] = field(default_factory=dict)  # parameters and buffers by their names in the model
    aliases: dict[str, str] = field(default_factory=dict)  # further names of tied parameters → a name in `tensors`
    optimizers: list[OptimizerContents] = field(default_factory=list)
    averages: list[dict[str, Any]] = field(default_factory=list)  # {"decay", "updates", "tensors": {name: Stored}}
    plain: dict[str, Any] = field(default_factory=dict)  # "extra", "schedulers", "scaler", "about"
    ranks: int = 0  # that have saved something of their own
    of_rank: Callable[[int], dict[str, Any]] = lambda rank: {}  # what one of them has: "rng", "data"
    base: dict[str, str] | None = None  # fingerprints of what was left out, where only trainable parameters were saved

    def tensor(self, *names: str) -> Stored | None:
        """The tensor under the first of these names that is there, itself or as another name of it."""
        for name in names:
            found = self.tensors.get(self.aliases.get(name, name))
            if found is not None:
                return found
        return None


def numel(stored: Stored) -> int:
    return math.prod(stored.shape)


def clean(name: str) -> str:
    """A parameter's name without what torch.compile puts into it, so that compiled and other models share files.

    >>> clean("_orig_mod.blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
