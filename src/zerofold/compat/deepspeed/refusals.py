"""What DeepSpeed has and the stand-in has not, with the reason, for the message."""

from __future__ import annotations

from typing import Any

PACKAGE = "zerofold.compat.deepspeed"

_TENSOR = "give initialize(mpu=zf.mesh(tensor=...)), or zf.tensor_parallel a plan"
_PIPELINE = "use zf.pipeline, with zf.prepare(mesh=zf.mesh(pipeline=...))"
_EXPERTS = "expert parallelism is still to come; experts in the model itself train at every stage"
_SEQUENCE = "zf.tensor_parallel(model, mesh, sequence_parallel=True) cuts sequences between the layers"
_INFERENCE = "zerofold trains; for inference use the model itself, engine.module.generate, or an inference server"
_KERNELS = "zerofold has no kernels to build"
_REASONS = {
    "init_inference": _INFERENCE,
    "default_inference_config": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "inference": _INFERENCE,
    "DeepSpeedHybridEngine": _INFERENCE,
    "runtime.hybrid_engine": _INFERENCE,
    "tp_model_init": _TENSOR,
    "set_autotp_mode": _TENSOR,
    "module_inject": _TENSOR,
    "runtime.tensor_parallel": _TENSOR,
    "pipe": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "runtime.pipe": _PIPELINE,
    "moe": _EXPERTS,
    "sequence": _SEQUENCE,
    "runtime.sequence_parallel": _SEQUENCE,
    "compression": "compression is no part of zerofold",
    "compile": "compile the model: engine.compile(), or torch.compile on its blocks",
    "DeepSpeedTransformerLayer": _KERNELS,
    "DeepSpeedTransformerConfig": _KERNELS,
    "replace_transformer_layer": _KERNELS,
    "ops.transformer": _KERNELS,
    "ops.op_builder": _KERNELS,
    "ops.sparse_attention": _KERNELS,
    "ops.aio": "offload_optimizer and offload_param with device nvme read and write the disk without it",
    "ops.lamb": "LAMB needs whole tensors and zerofold has none; take AdamW or Lion",
    "runtime.data_pipeline": "order and choose samples in the data loader; the model decides which tokens a layer sees",
    "DeepSpeedConfig": "initialize reads and checks the config itself; `zerofold.config` is where it does",
}

# Features that scripts import at their head and use only if an option says so. Their names can be imported, and what
# they name raises as soon as it is used. Of the others an ImportError is what scripts with a fallback wait for.
DEFERRED = (
    *("moe", "compression", "pipe", "runtime.pipe", "sequence", "runtime.sequence_parallel"),
    *("runtime.data_pipeline", "ops.sparse_attention"),
)
DEFERRED_CLASSES = ("DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig", "PipelineModule", "PipelineEngine")


def is_deferred(inner: str) -> bool:
    """Whether `deepspeed.<inner>` belongs to a feature whose refusal waits until it is used.

    >>> is_deferred("moe.layer"), is_deferred("ops.op_builder")
    (True, False)
    """
    return any(inner == name or inner.startswith(f"{name}.") for name in DEFERRED)


class Absent(type):
    """The class of classes that stand for what is missing: for annotations, bases, and isinstance, which is false."""

    missing: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(does_not_have(cls.missing))

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(does_not_have(f"{cls.missing}.{name}"), name=name)


def absent(module: str, name: str) -> Any:
    """A class or a function that raises, in one line, when it is called.

    >>> absent("deepspeed.moe.layer", "MoE")(hidden_size=8)
    Traceback (most recent call last):
    NotImplementedError: deepspeed.moe.layer.MoE: the zerofold stand-in does not have it (expert parallelism is still to come; experts in the model itself train at every stage)
    """  # noqa: E501 (one line is the point)
    return Absent(name, (), {"__module__": module, "missing": f"{module}.{name}"})


def does_not_have(name: str) -> str:
    """One line: the name as a user of DeepSpeed writes it, and why it is not there.

    >>> does_not_have("zerofold.compat.deepspeed.moe.layer")
    'deepspeed.moe.layer: the zerofold stand-in does not have it (expert parallelism is still to come; experts in the model itself train at every stage)'
    >>> does_not_have("deepspeed.anything")
    'deepspeed.anything: the zerofold stand-in does not have it'
    """  # noqa: E501 (one line is the point)
    inner = name.removeprefix(PACKAGE).removeprefix("deepspeed").lstrip(".")
    parts = inner.split(".")
    for length in range(len(parts), 0, -1):
        reason = _REASONS.get(".".join(parts[:length]))
        if reason is not None:
            return f"deepspeed.{inner}: the zerofold stand-in does not have it ({reason})"
    return f"deepspeed.{inner}: the zerofold stand-in does not have it"


def missing(module: str, name: str) -> AttributeError:
    """The error for a module's `__getattr__`."""
    return AttributeError(does_not_have(f"{module}.{name}"), name=name)
