"""The sections about dtypes: fp16, bf16, data_types, and what is said about them at the top."""

from __future__ import annotations

from zerofold.config.keys import Old, Section, Spec, honoured, mapped, refused, refused_section
from zerofold.config.kinds import FLAG, TEXT, choice, list_of, number, whole

DTYPE = choice("fp32", "fp16", "bf16")

FP16 = Section(
    {
        "enabled": honoured(FLAG, False, auto=True),
        "auto_cast": mapped(FLAG, "inputs are cast to the compute dtype in every case", False, auto=True),
        "loss_scale": honoured(number(0.0), 0.0),
        "initial_scale_power": honoured(whole(0, 127), 16),
        "loss_scale_window": honoured(whole(1), 1000),
        "hysteresis": honoured(whole(1), 2),
        "consecutive_hysteresis": honoured(FLAG, False),
        "min_loss_scale": honoured(number(above=0.0), 1.0),
        "fp16_master_weights_and_grads": mapped(
            FLAG, "masters stay fp32, since fp16 ones lose small updates", False, silent=(False,)
        ),
        "fp16_opt_level": mapped(TEXT, "part of Apex; masters are fp32, as in its O2", auto=True),
    }
)

BF16 = Section(
    {
        "enabled": honoured(FLAG, False, auto=True),
        "immediate_grad_update": mapped(FLAG, "gradients are added up as they come", False),
        "check_grad_overflow": mapped(FLAG, "every step is checked, by the norm it needs anyway", True, silent=(True,)),
        "check_overflow": Old("bf16.check_grad_overflow", FLAG),
        "bf16_master_weights_and_grads": honoured(FLAG, False),
        "bf16_optimizer_states": honoured(FLAG, False),
        "auto_cast": mapped(FLAG, "inputs are cast to the compute dtype in every case", False, auto=True),
    }
)

PRECISION: dict[str, Spec] = {
    "fp16": FP16,
    "bf16": BF16,
    "data_types": Section(
        {
            "grad_accum_dtype": honoured(DTYPE),
            "param_dtype": honoured(DTYPE),
            "buffer_dtype": honoured(DTYPE),
            "keep_in_fp32_modules": mapped(
                list_of(TEXT), "buffers keep their dtype unless buffer_dtype is given", auto=True
            ),
        },
        example='{"grad_accum_dtype": "fp32"}',
    ),
    "communication_data_type": honoured(DTYPE),
    "fp32_allreduce": Old("communication_data_type", FLAG, lambda is_on: "fp32" if is_on else None),
    "seq_parallel_communication_data_type": refused(
        "parts of sequences travel in the dtype of the activations; leave the key out"
    ),
    "torch_autocast": Section(
        {
            "enabled": honoured(FLAG, False),
            "dtype": honoured(
                choice("bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "torch.float16"), "bfloat16"
            ),
            "lower_precision_safe_modules": mapped(list_of(TEXT), "parameters are gathered in their own dtype"),
        },
        example='{"enabled": true, "dtype": "bfloat16"}',
    ),
    "amp": refused_section("Apex is not supported; use bf16.enabled or fp16.enabled"),
}
