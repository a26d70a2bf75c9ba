"""zerofold: train models whose states do not fit one device, on plain PyTorch."""

from zerofold.access import clip_grad_norm_, clip_grad_value_, full, full_grad, full_params, last_step, ledger, no_sync
from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.load import load
from zerofold.checkpoint.save import Saving, save, stage
from zerofold.loss_scale import LossScale, LossScaleError
from zerofold.optim.ema import EMA
from zerofold.optim.lion import Lion
from zerofold.precision import Precision
from zerofold.prepare import attach, close, prepare, shard
from zerofold.samples import Samples
from zerofold.sharded import ShardedParameter

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "CheckpointError",
    "Lion",
    "LossScale",
    "LossScaleError",
    "Precision",
    "Samples",
    "Saving",
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
    "load",
    "no_sync",
    "prepare",
    "save",
    "shard",
    "stage",
]
