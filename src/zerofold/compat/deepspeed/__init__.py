"""DeepSpeed's names on zerofold: enough that code written for DeepSpeed imports, trains, saves and resumes.

Ask for it in one of three ways: `import zerofold.compat.deepspeed as deepspeed` in your own code, `install()` before
code that imports `deepspeed` itself, or the folder of `stand_in_folder()` first on PYTHONPATH, which
`zerofold launch --as-deepspeed` does.
"""

from __future__ import annotations

from typing import Any

from zerofold.compat.deepspeed import accelerator, checkpoint, comm, constants, launcher, ops, runtime, utils
from zerofold.compat.deepspeed.accelerator import get_accelerator
from zerofold.compat.deepspeed.comm import init_distributed
from zerofold.compat.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, __version__
from zerofold.compat.deepspeed.refusals import DEFERRED_CLASSES, absent, missing
from zerofold.compat.deepspeed.runtime import zero
from zerofold.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from zerofold.compat.deepspeed.runtime.config import DeepSpeedConfigError
from zerofold.compat.deepspeed.runtime.engine import DeepSpeedEngine, initialize
from zerofold.compat.deepspeed.standing_in import install, stand_in_folder
from zerofold.compat.deepspeed.utils.logging import log_dist, logger
from zerofold.compat.initialize import add_config_arguments

version = __version__

__all__ = [
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "constants",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install",
    "launcher",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "stand_in_folder",
    "utils",
    "version",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in DEFERRED_CLASSES:
        return absent(__name__, name)
    raise missing(__name__, name)
