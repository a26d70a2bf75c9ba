"""Which variables of this terminal the ranks on other hosts are given."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

FORWARDED = (
    *(
        "PYTHON",
        "NCCL_",
        "GLOO_",
        "ZEROFOLD_",
        "OMP_",
        "MKL_",
        "HF_",
        "TRANSFORMERS_",
        "TOKENIZERS_",
        "TORCH",
        "TRITON_",
    ),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_", "CUBLAS_", "PYTORCH_", "UCX_", "MLFLOW", "WANDB_", "DS_"),
)
# They say something about this process, not about the job.
NEVER = re.compile(r"TORCHELASTIC_.*|PYTHONHOME|PYTHONSTARTUP")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ENV_FILE = ".deepspeed_env"


class BadVariable(ValueError):
    """A variable for the ranks that cannot be set; the message is one line for the user."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """
    >>> forwarded({"NCCL_DEBUG": "INFO", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "3"})
    {'NCCL_DEBUG': 'INFO'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED) and not NEVER.fullmatch(name) and "\n" not in value
    }


def exported(options: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The values of `--export NAME` and `--export NAME=VALUE`.

    >>> exported(["A=1", "HOME"], {"HOME": "/root"})
    {'A': '1', 'HOME': '/root'}
    """
    values = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not NAME.fullmatch(name):
            raise BadVariable(f'--export {option}: "{name}" is no variable name: write --export NAME or NAME=VALUE')
        if not equals and name not in environment:
            raise BadVariable(f"--export {name}: it is not set here: set it, or write --export {name}=VALUE")
        values[name] = value if equals else environment[name]
    return values


def env_files(home: Path, here: Path, name: str | None = None) -> dict[str, str]:
    """NAME=VALUE lines of the file that DeepSpeed's launcher reads, in the home folder and then in this one."""
    values: dict[str, str] = {}
    for folder in dict.fromkeys((home, here)):
        file = folder / (name or os.environ.get("DS_ENV_FILE") or ENV_FILE)
        if not file.is_file():
            continue
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            variable, equals, value = text.partition("=")
            if not equals or not NAME.fullmatch(variable.strip()):
                raise BadVariable(f'{file}:{number}: "{text}" sets no variable: write NAME=VALUE')
            values[variable.strip()] = value.strip()
    return values
