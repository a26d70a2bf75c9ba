"""What a device's own kernels keep and take, where tensors without memory would run others.

On the meta device torch computes attention by its plain form, which keeps whole score matrices, and dropout with a
mask as wide as its input. A device with fused kernels does neither. `DeviceKernels` sends such calls to the operator
that the device would choose; torch knows the shapes and the backward of each of them without having the device.

Kernels also take memory that is gone when they return, and that no output shows: `scratch` tells how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_FUSED_HEAD = 256
_TRAINING = {"train": "training"}  # the name of the same argument in torch.dropout and in F.dropout


class DeviceKernels(TorchFunctionMode):
    """While it is on, attention and dropout run the operators of `device` ("cuda" or "cpu"), on tensors of any kind."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            # In here a mode is off. Blocks that are recomputed in backward must find the kernels of forward.
            with self:
                return _backward(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(self._device, *args, **kwargs)
        if self._device == "cuda" and func in (F.dropout, torch.dropout):
            return _dropout(*args, **{_TRAINING.get(name, name): value for name, value in kwargs.items()})
        return func(*args, **kwargs)


def _backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """As torch.autograd.backward does, which would take the mode off again."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,),
        (torch.ones_like(loss) if gradient is None else gradient,),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        tuple(inputs or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """CUDA's kernel keeps a mask of one byte an element."""
    if not training or not 0 < p < 1 or inplace:
        return F.dropout(input, p, training, inplace)
    result: Tensor = aten.native_dropout(input, p, True)[0]
    return result


def _attention(
    device: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    choose = _choose_on_cuda if device == "cuda" else _choose_on_cpu
    form = (
        choose(query, key, value, attn_mask, dropout_p) if _have_like_heads(query, key, value, enable_gqa) else "plain"
    )
    if form == "plain":
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # as torch does before it calls a fused kernel
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    if form == "flash":
        # cuDNN's kernel, which newer versions of torch prefer on some devices, keeps the same tensors.
        return _first(aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale))
    if form == "cpu":
        return _first(
            aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        )
    if key.shape[1] != query.shape[1]:  # grouped heads: this kernel has them as views, its gradients as whole heads
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return _first(
        aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )
    )


def _have_like_heads(query: Tensor, key: Tensor, value: Tensor, is_grouped: bool) -> bool:
    """No fused kernel broadcasts: one head of keys for all queries (Falcon) asks for the plain form, unless it is said
    that heads come in groups."""
    dims = 1 if is_grouped else 2
    return query.shape[:dims] == key.shape[:dims] and key.shape[:2] == value.shape[:2]


def _first(results: Any) -> Tensor:
    found: Tensor = results[0]
    return found


def _choose_on_cuda(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> str:
    """The rules of torch's sdp_utils.cpp for devices of compute capability 8.0 and later.

    flash       16 bit, no mask, heads of at most 256
    efficient   16 or 32 bit, masks that are not learnt, heads of a multiple of 16 bytes
    plain       everything else; learnt masks (T5's positions) were seen to take it on torch 2.11
    """
    head, of_value = query.shape[-1], value.shape[-1]
    if query.dim() != 4 or not query.dtype == key.dtype == value.dtype:
        return "plain"
    if query.dtype in _HALF and mask is None and head == of_value <= _LARGEST_FUSED_HEAD and head % 8 == 0:
        return "flash"
    if mask is not None and mask.requires_grad:
        return "plain"
    in_16_bytes = 16 // query.dtype.itemsize
    is_wide_enough = head % in_16_bytes == 0 and of_value % in_16_bytes == 0
    return "efficient" if query.dtype in (*_HALF, torch.float32) and is_wide_enough else "plain"


def _choose_on_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> str:
    """The rules of torch's sdp_utils_cpp.cpp."""
    is_usual = query.dim() == 4 and query.shape[-1] == value.shape[-1] and query.dtype == key.dtype == value.dtype
    learns_mask = mask is not None and mask.requires_grad
    return "cpu" if is_usual and not dropout and not learns_mask else "plain"


def scratch(device: str, func: Any, args: Sequence[Any]) -> int:
    """Bytes that one call takes while it runs and has given back when it returns.

    CUDA: the backward of fused attention adds up the gradient of the queries in fp32, beside a row sum for each of
    them; with grouped heads the flash kernel makes the gradients of keys and values for every head of the queries. A
    softmax that spares rows without entries looks for them, and makes its result a second time.
    """
    packet = func.overloadpacket
    if device == "cpu":
        return _scratch_of_cpu(packet, args)
    if packet is aten._safe_softmax:
        return int(args[0].numel() * (1 + args[0].element_size()))
    if packet is aten._scaled_dot_product_flash_attention_backward:
        _, query, key = args[:3]
        batch, heads, length, head = query.shape
        rows = batch * heads * _up(length, 128)
        sums = 4 * rows * (_up(head, 32) + 1)
        expanded = 0 if key.shape[1] == heads else 2 * batch * heads * key.shape[2] * head * key.element_size()
        return sums + expanded
    if packet is aten._scaled_dot_product_efficient_attention_backward:
        query = args[1]
        rows = query.shape[0] * query.shape[1] * _up(query.shape[2], 32)
        return 4 * rows * (1 + (query.shape[3] if query.dtype in _HALF else 0))
    return 0


def _scratch_of_cpu(packet: Any, args: Sequence[Any]) -> int:
    """The CPU's attention has a tile of scores for each thread."""
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        query, key = args[:2]
        length, head = query.shape[-2:]
        rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
        tile = rows * min(512, key.shape[-2]) + 2 * rows + rows * head
        return 4 * tile * torch.get_num_threads()
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        query, key = args[1:3]
        rows, columns = min(query.shape[-2], 32), min(key.shape[-2], 512)
        return 4 * (2 * rows * columns) * torch.get_num_threads()
    return 0


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
