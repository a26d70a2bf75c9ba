"""All keys of a config, with those about batches, gradients, checkpoints and other parallelism; see also keys_*.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerofold.config.keys import Old, Section, Spec, honoured, mapped, refused, refused_section
from zerofold.config.keys_monitoring import MONITORING
from zerofold.config.keys_precision import PRECISION
from zerofold.config.keys_zero import ZERO
from zerofold.config.kinds import FLAG, MAPPING, REAL, TEXT, choice, number, whole

_DISK = "zerofold reads and writes the disk without libaio, in blocks and threads of its own choice"
_OWN_CHECKPOINTS = "zerofold writes its own checkpoints, one file per rank, each checked and renamed when whole"
_PARTITION = (
    "cut over the tensor ranks of zf.initialize(mpu=zf.mesh(tensor=...)) or deepspeed.checkpointing.configure(mpu); "
    "without such ranks there is nothing to cut"
)
_TENSOR_PARALLEL = "give zf.initialize(mpu=zf.mesh(tensor=...)) instead, which shares known layers by itself"
_PIPELINE = "zf.pipeline with zf.prepare(mesh=zf.mesh(pipeline=...)) has stages; the engine of zf.initialize has not"
_EXPERTS = "expert parallelism is still to come; experts are sharded like all parameters"
_DEEPCOMPILE = "part of DeepCompile, which is off"
_COMPILE = "from before DeepSpeed 0.15 and not done by a config since: call engine.compile()"
_DEEPCOMPILE_FLAGS = (
    "autoep_non_moe",
    "debug_log",
    "double_buffer",
    "free_activation",
    "keep_all_input_tensors",
    "keep_int_input_tensors",
    "offload_activation",
    "offload_activation_pin_memory",
    "offload_opt_states",
    "offload_parameters",
    "symmetric_memory",
    "sync_after_allgather",
    "sync_after_reduce",
    "sync_before_allgather",
    "sync_before_reduce",
)

BATCH: dict[str, Spec] = {
    "train_batch_size": honoured(whole(1), auto=True),
    "train_micro_batch_size_per_gpu": honoured(whole(1), auto=True),
    "gradient_accumulation_steps": honoured(whole(1), auto=True),
    "managed_gradient_accumulation": honoured(FLAG, True),
    "dataloader_drop_last": honoured(FLAG, False),
}

GRADIENTS: dict[str, Spec] = {
    "gradient_clipping": honoured(number(0.0), auto=True),
    "prescale_gradients": mapped(FLAG, "gradients are averaged in the reduction's dtype", False, silent=(False,)),
    "gradient_predivide_factor": mapped(
        number(above=0.0), "gradients are averaged in the reduction's dtype", 1.0, silent=(1.0,)
    ),
    "gradient_allreduce_op": refused(
        "gradients are averaged over ranks; use mean, and multiply the loss by the number of ranks for a sum",
        off=lambda value: value is None or str(value).lower() == "mean",
    ),
    "sparse_gradients": refused("gradients are reduced as dense tensors; leave the key out"),
    "disable_allgather": mapped(FLAG, "each stage gathers as it needs to", False, silent=(False,)),
}

COMPONENTS: dict[str, Spec] = {
    "optimizer": Section(
        {
            "type": honoured(TEXT),
            "params": honoured(MAPPING),
            "legacy_fusion": mapped(FLAG, "there is one update, in one pass", False, silent=(False,)),
        },
        example='{"type": "AdamW", "params": {"lr": 1e-4}}',
    ),
    "scheduler": Section(
        {"type": honoured(TEXT), "params": honoured(MAPPING)},
        example='{"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
    ),
    "zero_allow_untested_optimizer": mapped(FLAG, "every optimizer is probed, none is on a list", False),
    "zero_force_ds_cpu_optimizer": mapped(FLAG, "the optimizer given is the one used", True),
}

CHECKPOINTS: dict[str, Spec] = {
    "checkpoint": Section(
        {
            "tag_validation": honoured(choice("Ignore", "Warn", "Fail"), "Warn"),
            "load_universal": mapped(FLAG, "every checkpoint loads anywhere, universal or not", False, silent=(False,)),
            "use_node_local_storage": mapped(
                FLAG, "each rank writes its own file, into a folder that all ranks must see", False, silent=(False,)
            ),
            "parallel_write": Section(
                {"pipeline_stage": mapped(FLAG, "every rank writes its own part", False, silent=(False,))},
                example='{"pipeline_stage": false}',
            ),
            "checkpoint_serialization": mapped(FLAG, _OWN_CHECKPOINTS, True),
            "writer": mapped(MAPPING, _OWN_CHECKPOINTS),
        },
        example='{"tag_validation": "Warn"}',
    ),
    "nebula": refused_section("zerofold writes its own checkpoints, also in the background; leave the section out"),
    "datastates_ckpt": refused("zerofold writes its own checkpoints, also in the background; leave the section out"),
}

ACTIVATIONS: dict[str, Spec] = {
    "activation_checkpointing": Section(
        {
            "partition_activations": mapped(FLAG, _PARTITION, False, silent=(False,)),
            "cpu_checkpointing": honoured(FLAG, False),
            "contiguous_memory_optimization": honoured(FLAG, False),
            "number_checkpoints": honoured(whole(0)),
            "synchronize_checkpoint_boundary": honoured(FLAG, False),
            "profile": honoured(FLAG, False),
        },
        example='{"cpu_checkpointing": true}',
    ),
}


def _is_one_stage(value: Any) -> bool:
    return not isinstance(value, Mapping) or value.get("stages", "auto") in ("auto", 1, None)


def _is_one_part(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return not value
    inner = value.get("tp", value.get("tensor_parallel", {}))
    sizes = (value.get("autotp_size", 0), inner.get("tp_size", 1) if isinstance(inner, Mapping) else inner)
    return all(size in (0, 1, None) for size in sizes)


OTHER_PARALLELISM: dict[str, Spec] = {
    "tensor_parallel": refused(_TENSOR_PARALLEL, off=_is_one_part),
    "autotp_size": refused(_TENSOR_PARALLEL, off=lambda size: size in (None, 0, 1)),
    "pipeline": refused(_PIPELINE, off=_is_one_stage),
    "sequence_parallel_size": refused(
        "zf.tensor_parallel(model, mesh, sequence_parallel=True) cuts it between layers; leave it out, or make it 1",
        off=lambda size: size in (None, 1),
    ),
    "data_parallel_size": mapped(whole(1), "all ranks are data parallel, but for the tensor ranks of mpu="),
    "expert_parallel": refused_section(_EXPERTS),
    "use_data_before_expert_parallelism": refused(_EXPERTS),
}

MACHINE: dict[str, Spec] = {
    "aio": Section(
        {
            "block_size": mapped(whole(1), _DISK, 1_048_576, auto=True),
            "queue_depth": mapped(whole(1), _DISK, 8, auto=True),
            "intra_op_parallelism": mapped(whole(1), _DISK, 1, auto=True),
            "thread_count": mapped(whole(1), _DISK, 1, auto=True),
            "single_submit": mapped(FLAG, _DISK, False, auto=True),
            "overlap_events": mapped(FLAG, _DISK, True, auto=True),
            "use_gds": mapped(FLAG, _DISK, False),
        },
        example='{"queue_depth": 8}',
    ),
    "compile": Section(
        {
            "deepcompile": refused("torch.compile each block instead: zerofold gathers around compiled graphs"),
            "passes": refused("part of DeepCompile; torch.compile each block instead"),
            **dict.fromkeys(_DEEPCOMPILE_FLAGS, mapped(FLAG, _DEEPCOMPILE)),
            "free_activation_threshold": mapped(whole(0), _DEEPCOMPILE),
            "enabled": mapped(FLAG, _COMPILE, False, silent=(False,)),
            "disable": mapped(FLAG, _COMPILE, True, silent=(True,)),
            "backend": mapped(TEXT, _COMPILE),
            "kwargs": mapped(MAPPING, _COMPILE, silent=({},)),
        },
        example='{"deepcompile": false}',
    ),
    "disable_python_gc": mapped(FLAG, "Python's garbage collector is left alone", False, silent=(False,)),
    "vocabulary_size": mapped(whole(1), "only ever a hint about alignment"),
    "allgather_size": Old("zero_optimization.allgather_bucket_size", REAL, int),
}

_NO_QUANTISING = "zerofold trains the model as it is; quantise it after training, or train a quantised base with LoRA"
_NO_DATA_PIPELINE = "zerofold leaves the data to you; order and choose samples in the data loader"

NEVER: dict[str, Spec] = {
    "autotuning": refused_section("zerofold does not run trials; use zerofold plan to choose stage and batch"),
    "elasticity": refused_section(
        "give train_batch_size and leave the accumulation out: any number of ranks that divides it then works"
    ),
    "compression_training": refused_section(_NO_QUANTISING),
    "quantize_training": refused_section(_NO_QUANTISING),
    "weight_quantization": refused(_NO_QUANTISING),
    "eigenvalue": refused_section(_NO_QUANTISING),
    "data_efficiency": refused_section(_NO_DATA_PIPELINE),
    "curriculum_learning": refused_section(_NO_DATA_PIPELINE),
    "progressive_layer_drop": refused_section("the model decides which layers run; drop them in its forward"),
    "sparse_attention": refused("attention belongs to the model; use torch's flex_attention in it"),
    "graph_harvesting": refused("CUDA graphs belong to the model; use torch.compile with mode='reduce-overhead'"),
    "hybrid_engine": refused_section("generation runs on the sharded model as it is; leave the section out"),
}

TABLE = Section(
    {
        **BATCH,
        **GRADIENTS,
        **COMPONENTS,
        "zero_optimization": ZERO,
        **PRECISION,
        **ACTIVATIONS,
        **MONITORING,
        **CHECKPOINTS,
        **OTHER_PARALLELISM,
        **MACHINE,
        **NEVER,
    },
    example='{"train_batch_size": 32}',
)
"""Every key that DeepSpeed 0.19 knows, and the old ones."""
