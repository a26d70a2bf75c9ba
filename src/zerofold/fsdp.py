"""FSDP's names on zerofold: `from zerofold.fsdp import FullyShardedDataParallel` in place of `torch.distributed.fsdp`.

Option classes, state dict types and wrapping policies are torch's own, whichever module they are imported from.
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from zerofold.compat.fsdp_fully import FSDPModule, fully_shard, register_fsdp_forward_method
from zerofold.compat.fsdp_module import FullyShardedDataParallel
from zerofold.compat.fsdp_scaler import ShardedGradScaler
from zerofold.compat.fsdp_whole import get_model_state_dict, get_optimizer_state_dict, get_state_dict

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "always_wrap_policy",
    "enable_wrap",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "lambda_auto_wrap_policy",
    "register_fsdp_forward_method",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
