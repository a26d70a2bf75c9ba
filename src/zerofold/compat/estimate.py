"""What a model's states need per GPU and per host, before any of it is there: DeepSpeed's tables, zerofold's numbers.

The arithmetic is that of `zerofold plan`. Activations, communication buffers and what torch itself takes come on top.
"""

from __future__ import annotations

from torch import nn

from zerofold.plan.states import Widths, state_bytes

_WIDTHS = Widths()  # bf16, fp32 sums, AdamW in fp32
_BUILT = 4  # bytes: in fp32, as torch builds modules


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes per host and per GPU at stage 2. `cpu_offload`: gradients and optimizer states are in host memory.

    >>> estimate_zero2_model_states_mem_needs(1_000_000, num_gpus_per_node=4, cpu_offload=False)
    (24000000, 6000000)
    """
    _check(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    held = state_bytes(total_params, 2, num_gpus_per_node * num_nodes, widths=_WIDTHS)
    built = _BUILT * total_params * num_gpus_per_node
    moved = held.total - held.parameters if cpu_offload else 0.0
    host = max(built, moved * num_gpus_per_node) * additional_buffer_factor
    return int(host), int(held.total - moved)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes per host, per GPU, and of the largest layer while it is gathered (it and the one that is fetched ahead).

    `cpu_offload`: gradients and optimizer states, and with them the masters that parameters are made from, are in host
    memory, so that `cpu_offload_params` changes nothing more. `zero_init`: the model is built inside zero.Init, one
    layer at a time.

    >>> estimate_zero3_model_states_mem_needs(1_000_000, 10_000, num_gpus_per_node=4, cpu_offload=False)
    (240000, 4040000, 40000)
    """
    _check(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    held = state_bytes(total_params, 3, num_gpus_per_node * num_nodes, widths=_WIDTHS)
    gathered = 2 * _WIDTHS.compute * largest_layer_params
    built = _BUILT * (largest_layer_params if zero_init else total_params) * num_gpus_per_node
    moved = held.total if cpu_offload else 0.0
    host = max(built, moved * num_gpus_per_node) * additional_buffer_factor
    return int(host), int(held.total - moved + gathered), gathered


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the table of stage 2 for a model, on any device, "meta" too.

    >>> from torch import nn
    >>> model = nn.Linear(2**15, 2**15, bias=False, device="meta")
    >>> estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    States of a model of 1074M parameters on 1 node with 2 GPUs, stage 2 (16-bit, AdamW; without activations):
      per CPU  |  per GPU | Options
       24.00GB |   2.00GB | offload_optimizer=cpu
       12.00GB |  10.00GB | offload_optimizer=none
    """
    total, _ = _count(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the table of stage 2 for a number of parameters."""
    _print_heading(total_params, None, num_gpus_per_node, num_nodes, 2)
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _print_line(host, device, f"offload_optimizer={_where(offload)}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the table of stage 3 for a model, on any device, "meta" too."""
    total, largest = _count(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the table of stage 3 for numbers of parameters, of all and of the largest layer."""
    _print_heading(total_params, largest_layer_params, num_gpus_per_node, num_nodes, 3)
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                offload_params,
                zero_init,
                additional_buffer_factor,
            )
            options = f"offload_param={_where(offload_params)}, offload_optimizer={_where(offload)}"
            _print_line(host, device, f"{options}, zero_init={int(zero_init)}")


def _count(model: nn.Module) -> tuple[int, int]:
    """Parameters in all, shared ones once, and those of the module that has the most by itself."""
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(p.numel() for p in model.parameters()), largest


def _check(total_params: int, gpus: int, nodes: int, factor: float) -> None:
    for name, value in (("total_params", total_params), ("num_gpus_per_node", gpus), ("num_nodes", nodes)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if factor <= 0:
        raise ValueError(f"additional_buffer_factor={factor} must be positive: it multiplies host memory")


def _where(on_host: bool) -> str:
    return "cpu" if on_host else "none"


def _print_heading(total: int, largest: int | None, gpus: int, nodes: int, stage: int) -> None:
    layer = "" if largest is None else f" ({largest / 1e6:.0f}M in its largest layer)"
    hardware = f"{nodes} node{'s' * (nodes > 1)} with {gpus} GPU{'s' * (gpus > 1)}"
    print(
        f"States of a model of {total / 1e6:.0f}M parameters{layer} on {hardware}, stage {stage} (16-bit, AdamW; "
        "without activations):"
    )
    print("  per CPU  |  per GPU | Options")


def _print_line(host: int, device: int, options: str) -> None:
    print(f" {host / 2**30:7.2f}GB | {device / 2**30:6.2f}GB | {options}")
