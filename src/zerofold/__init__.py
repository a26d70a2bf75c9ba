"""zerofold: train models whose states do not fit one device, on plain PyTorch."""

from zerofold.access import clip_grad_norm_, clip_grad_value_, full, full_grad, full_params, last_step, ledger, no_sync
from zerofold.loss_scale import LossScale, LossScaleError
from zerofold.optim.ema import EMA
from zerofold.optim.lion import Lion
from zerofold.precision import Precision
from zerofold.prepare import attach, close, prepare, shard
from zerofold.sharded import ShardedParameter

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "Lion",
    "LossScale",
    "LossScaleError",
    "Precision",
    "ShardedParameter",
    "attach",
    "clip_grad_norm_",
    "clip_grad_value_",
    "close",
    "full",
    "full_grad",
    "full_params",
    "last_step",
    "ledger",
    "no_sync",
    "prepare",
    "shard",
]
