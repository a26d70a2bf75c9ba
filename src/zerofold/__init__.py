"""zerofold: train models whose states do not fit one device, on plain PyTorch."""

from zerofold.access import clip_grad_norm_, full, full_grad, full_params, ledger, no_sync
from zerofold.optim.lion import Lion
from zerofold.prepare import attach, close, prepare, shard
from zerofold.sharded import ShardedParameter

__version__ = "0.1.0"

__all__ = [
    "Lion",
    "ShardedParameter",
    "attach",
    "clip_grad_norm_",
    "close",
    "full",
    "full_grad",
    "full_params",
    "ledger",
    "no_sync",
    "prepare",
    "shard",
]
