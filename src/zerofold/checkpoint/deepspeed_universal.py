"""DeepSpeed's universal form: a folder for each parameter, a file for each of its states, nothing cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerofold.checkpoint.contents import Contents, OptimizerContents
from zerofold.checkpoint.ondisk import TensorOnDisk
from zerofold.checkpoint.torch_file import load_torch
from zerofold.checkpoint.unpickle import plain

MASTER = "fp32"


def read_universal(contents: Contents, folder: Path, groups_of_names: list[dict[str, Any]] | None) -> None:
    """Adds masters to the tensors, and an optimizer where there are states."""
    states: dict[str, dict[str, Any]] = {}
    for parameter in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in contents.aliases):
        for file in sorted(parameter.glob("*.pt")):
            value = _value(file)
            if file.stem != MASTER:
                states.setdefault(parameter.name, {})[file.stem] = value
            elif isinstance(value, TensorOnDisk):
                contents.tensors[parameter.name] = value
    if not states:
        return
    names = [[name for name in group if name in states] for group in groups_of_names or [dict(states)]]
    saved = folder / "optimizer_state.pt"
    groups = plain(load_torch(saved)["param_groups"], str(saved)) if saved.is_file() else []
    if sum(len(group["params"]) for group in groups) != len(names):
        groups = [{"params": [number]} for number in range(len(names))]  # their settings are not known
    contents.optimizers.append(
        OptimizerContents(
            [{**group, "params": [name for n in group["params"] for name in names[n]]} for group in groups], states
        )
    )


def _value(file: Path) -> Any:
    found = load_torch(file)
    if isinstance(found, dict):
        found = found["param"]
    return found if isinstance(found, TensorOnDisk) else plain(found, str(file))
