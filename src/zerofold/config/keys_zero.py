"""The section zero_optimization."""

from __future__ import annotations

from typing import Any

from zerofold.config.keys import Old, Section, honoured, mapped, refused, refused_section
from zerofold.config.kinds import FLAG, TEXT, choice, list_of, number, whole

DEFAULT_BUCKET = 500_000_000

_LIVE = "gathers one unit ahead under a bound in bytes; set live_bytes= of zf.shard for another bound"
_LAYOUT = "each unit lies in one flat space, so there is nothing to choose"
_EVERY = "every stage does it in one way, the one with the fewest bytes on the wire"
_CHECKED = "what could go wrong is always checked"
_DISK = "reads, update and writes always overlap, in large blocks over a ring of buffers of zerofold's own size"
_BOUNDED = "parameters on the disk take host memory for the blocks under way alone"
_QUANTISED = (
    "zerofold sends values as they are; set communication_data_type to bf16 (half the bytes of gradients), or "
    "zero_hpz_partition_size (parameters gathered inside a node)"
)
_PINNED = "host memory beside an accelerator is always pinned, at the size that is needed"

OFFLOAD_DEVICE = choice("cpu", "nvme", "none")


def _shorthand(is_on: bool) -> dict[str, Any]:
    return {"stage": 1 if is_on else 0}


def _to_host(is_on: bool) -> str:
    return "cpu" if is_on else "none"


OFFLOAD_PARAM = Section(
    {
        "device": honoured(OFFLOAD_DEVICE, "none"),
        "nvme_path": honoured(TEXT),
        "buffer_count": mapped(whole(), _DISK, 5),
        "buffer_size": mapped(whole(), _DISK, 100_000_000, auto=True),
        "max_in_cpu": mapped(whole(), _BOUNDED, 1_000_000_000, auto=True),
        "pin_memory": mapped(FLAG, _PINNED, True),
    },
    example='{"device": "cpu"}',
)

OFFLOAD_OPTIMIZER = Section(
    {
        "device": honoured(OFFLOAD_DEVICE, "none"),
        "nvme_path": honoured(TEXT),
        "buffer_count": mapped(whole(), _DISK, 4),
        "pin_memory": mapped(FLAG, _PINNED, True),
        "pipeline": mapped(FLAG, _DISK, False, silent=(False,)),
        "pipeline_read": mapped(FLAG, _DISK, False, silent=(False,)),
        "pipeline_write": mapped(FLAG, _DISK, False, silent=(False,)),
        "fast_init": mapped(
            FLAG,
            "the file is made once, at its full size, and states are written to it as they come",
            False,
            silent=(False,),
        ),
        "ratio": honoured(number(0.0, most=1.0), 1.0),
        "super_offload": mapped(FLAG, "zerofold has one way to offload", False, silent=(False,)),
        "cpuadam_cores_perc": mapped(number(0.0, most=1.0), "threads are chosen by measurement at the start", 0.8),
    },
    example='{"device": "cpu"}',
)

_GATHER_ON_SAVE = "zero_optimization.stage3_gather_16bit_weights_on_model_save"

ZERO = Section(
    {
        "stage": honoured(whole(0, 3), 0),
        "offload_optimizer": OFFLOAD_OPTIMIZER,
        "offload_param": OFFLOAD_PARAM,
        "overlap_comm": honoured(FLAG),
        # Sizes of buffers: the two bucket sizes are upper bounds of one buffer here.
        "reduce_bucket_size": honoured(whole(), DEFAULT_BUCKET, auto=True),
        "allgather_bucket_size": honoured(whole(), DEFAULT_BUCKET, auto=True),
        # Groups of ranks.
        "zero_hpz_partition_size": honoured(whole(), 1),
        "mics_shard_size": honoured(whole(-1), -1),
        "mics_hierarchical_params_gather": mapped(FLAG, "parameters are gathered inside the group", False),
        # Saving.
        "stage3_gather_16bit_weights_on_model_save": honoured(FLAG, False, auto=True),
        "gather_16bit_weights_on_model_save": Old(_GATHER_ON_SAVE, FLAG),
        "stage3_gather_fp16_weights_on_model_save": Old(_GATHER_ON_SAVE, FLAG),
        # How stage 3 gathers and releases.
        "stage3_max_live_parameters": mapped(whole(), _LIVE, 1_000_000_000, auto=True),
        "stage3_max_reuse_distance": mapped(whole(), _LIVE, 1_000_000_000, auto=True),
        "stage3_prefetch_bucket_size": mapped(whole(), _LIVE, 50_000_000, auto=True),
        "stage3_param_persistence_threshold": mapped(
            whole(), "small parameters travel with their unit, so none need stay whole", 100_000, auto=True
        ),
        "stage3_model_persistence_threshold": mapped(
            whole(), "small parameters travel with their unit, so none need stay whole", auto=True
        ),
        "max_live_parameters": Old("zero_optimization.stage3_max_live_parameters", whole()),
        "max_reuse_distance": Old("zero_optimization.stage3_max_reuse_distance", whole()),
        "prefetch_bucket_size": Old("zero_optimization.stage3_prefetch_bucket_size", whole()),
        "param_persistence_threshold": Old("zero_optimization.stage3_param_persistence_threshold", whole()),
        "model_persistence_threshold": Old("zero_optimization.stage3_model_persistence_threshold", whole()),
        "stage3_module_granularity_threshold": mapped(whole(), "units are found by their repetition", 0),
        "module_granularity_threshold": Old("zero_optimization.stage3_module_granularity_threshold", whole()),
        "stage3_use_all_reduce_for_fetch_params": mapped(FLAG, _EVERY, False, silent=(False,)),
        "use_all_reduce_for_fetch_params": Old("zero_optimization.stage3_use_all_reduce_for_fetch_params", FLAG),
        "stage3_allgather_sequential": mapped(FLAG, _EVERY, False, silent=(False,)),
        "allgather_sequential": Old("zero_optimization.stage3_allgather_sequential", FLAG),
        "leaf_module": Section(
            {
                name: mapped(
                    list_of(TEXT), "units are found by their repetition; a changed order is gathered on demand"
                )
                for name in ("classes", "names", "name_suffixes")
            },
            example='{"classes": [...]}',
        ),
        # How gradients travel and where they lie.
        "contiguous_gradients": mapped(FLAG, _LAYOUT, True),
        "reduce_scatter": mapped(FLAG, _EVERY, True),
        "allgather_partitions": mapped(FLAG, _EVERY, True),
        "use_multi_rank_bucket_allreduce": mapped(FLAG, _EVERY, True),
        "round_robin_gradients": mapped(FLAG, _LAYOUT, False, silent=(False,)),
        "parameter_alignment": mapped(FLAG, "every parameter starts on 128 bytes", False),
        "sub_group_size": mapped(
            whole(), "the update goes through each shard once, in blocks", 1_000_000_000, auto=True
        ),
        "compute_grad_norm": mapped(FLAG, "the norm is the check for finite gradients, and always known", True),
        "ignore_unused_parameters": mapped(
            FLAG, "a parameter without a gradient on every rank is left alone", True, silent=(True,)
        ),
        # Modules and checks.
        "memory_efficient_linear": mapped(FLAG, "torch's own linear layers are used", True),
        "override_module_apply": mapped(FLAG, "Module.apply is left alone", True),
        "log_trace_cache_warnings": mapped(FLAG, "there is no trace: the order is learned", False, silent=(False,)),
        "enable_sanity_checks": mapped(FLAG, _CHECKED, False, silent=(False,)),
        "save_muon_momentum_buffer_in_memory": mapped(
            FLAG, "all states of an optimizer are in one memory", False, silent=(False,)
        ),
        # Checkpoints.
        "load_from_fp32_weights": mapped(FLAG, "masters are loaded from fp32 where the checkpoint has it", True),
        "elastic_checkpoint": mapped(FLAG, "every checkpoint loads at any number of ranks", False, silent=(False,)),
        "pipeline_loading_checkpoint": mapped(FLAG, "each rank reads only its own slices", False, silent=(False,)),
        "legacy_stage1": mapped(FLAG, "there is one stage 1", False, silent=(False,)),
        # Old names of offloading.
        "cpu_offload": Old("zero_optimization.offload_optimizer.device", FLAG, _to_host),
        "cpu_offload_param": Old("zero_optimization.offload_param.device", FLAG, _to_host),
        "cpu_offload_params": Old("zero_optimization.offload_param.device", FLAG, _to_host),
        "cpu_offload_use_pin_memory": mapped(FLAG, _PINNED, True),
        # What compresses.
        "zero_quantized_weights": refused(_QUANTISED),
        "zero_quantized_nontrainable_weights": refused(_QUANTISED),
        "zero_quantized_gradients": refused(_QUANTISED),
        "zeropp_loco_param": refused(_QUANTISED),
        "zenflow": refused_section("ZenFlow updates with stale gradients; use offload_optimizer"),
    },
    example='{"stage": 2}',
    short=_shorthand,
)
