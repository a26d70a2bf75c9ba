"""deepspeed.zero."""

from __future__ import annotations

from typing import Any

from zerofold.compat.deepspeed.refusals import missing
from zerofold.compat.deepspeed.runtime.zero import (
    offload_config,
    partition_parameters,
    stage3,
    stage_1_and_2,
)
from zerofold.compat.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "unregister_external_parameter",
]


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
