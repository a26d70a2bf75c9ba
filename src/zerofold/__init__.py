"""zerofold: train models whose states do not fit one device, on plain PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerofold.access import clip_grad_norm_, clip_grad_value_, full, full_grad, full_params, last_step, ledger, no_sync
from zerofold.accumulate import accumulate
from zerofold.activation.blocks import Checkpointing, checkpoint_blocks
from zerofold.activation.checkpointing import checkpoint as _checkpoint_of_activations
from zerofold.activation.cross_entropy import cross_entropy
from zerofold.activation.offload import offload_activations
from zerofold.activation.store import CheckpointStore
from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.export import export
from zerofold.checkpoint.load import load
from zerofold.checkpoint.save import save, stage
from zerofold.checkpoint.saving import Saving
from zerofold.checkpoint.whole import full_tensors
from zerofold.comm import CommError, DivergenceError
from zerofold.compat.accelerator import Accelerator
from zerofold.compat.initialize import add_config_arguments, initialize
from zerofold.join import join
from zerofold.loss_scale import LossScale, LossScaleError
from zerofold.observe.out_of_memory import explain_oom
from zerofold.observe.run import Run
from zerofold.optim.ema import EMA
from zerofold.optim.lion import Lion
from zerofold.parallel.mesh import Mesh, mesh
from zerofold.park import offload_states, reload_states
from zerofold.plan.call import plan
from zerofold.precision import Precision
from zerofold.prepare import attach, close, prepare, shard
from zerofold.replicas import ReplicaError
from zerofold.samples import Samples
from zerofold.sharded import ShardedParameter
from zerofold.simulation.run import simulate

if TYPE_CHECKING:
    from zerofold.parallel.pipeline import Pipeline, pipeline
    from zerofold.parallel.tensor import tensor_parallel


_LOADED_LATER = {
    "Pipeline": "zerofold.parallel.pipeline",
    "pipeline": "zerofold.parallel.pipeline",
    "tensor_parallel": "zerofold.parallel.tensor",
}


def __getattr__(name: str) -> Any:
    """What needs torch's DTensor and pipelining is loaded with its first use: they take a second."""
    if name not in _LOADED_LATER:
        raise AttributeError(f"module 'zerofold' has no attribute {name!r}")
    return getattr(import_module(_LOADED_LATER[name]), name)


# The package of that name is loaded by now and stays in sys.modules: `from zerofold.checkpoint.save import …` works.
checkpoint = _checkpoint_of_activations

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "Accelerator",
    "CheckpointError",
    "CheckpointStore",
    "Checkpointing",
    "CommError",
    "DivergenceError",
    "Lion",
    "LossScale",
    "LossScaleError",
    "Mesh",
    "Pipeline",
    "Precision",
    "ReplicaError",
    "Run",
    "Samples",
    "Saving",
    "ShardedParameter",
    "accumulate",
    "add_config_arguments",
    "attach",
    "checkpoint",
    "checkpoint_blocks",
    "clip_grad_norm_",
    "clip_grad_value_",
    "close",
    "cross_entropy",
    "explain_oom",
    "export",
    "full",
    "full_grad",
    "full_params",
    "full_tensors",
    "initialize",
    "join",
    "last_step",
    "ledger",
    "load",
    "mesh",
    "no_sync",
    "offload_activations",
    "offload_states",
    "pipeline",
    "plan",
    "prepare",
    "reload_states",
    "save",
    "shard",
    "simulate",
    "stage",
    "tensor_parallel",
]
