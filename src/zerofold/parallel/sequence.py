"""Which norms work on a part of the sequence, where it is cut, and where it is put together again.

    whole ──► cut before the first block ──► part ┬─ norm ──► gathered ──►[ columns │ rows ]──► summed and cut ─┬─► part
                                                  └────────────────────────────────────────────────────────────┘
    …         part ── norm after the last block ──► gathered ──► whole

A model may have several rows of blocks: T5's decoder reads what the encoder's gives, which is whole.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from zerofold.parallel.styles import (
    SEQUENCE,
    CutLayer,
    CutSequence,
    Experts,
    GatheredSequence,
    LocalCounts,
    RoutedTokens,
    Several,
    SharedInput,
    SummedGradients,
)

Plan = dict[str, ParallelStyle]

NORMS = (
    ("input_layernorm", "post_attention_layernorm"),
    ("attention_norm", "mlp_norm"),
    ("ln_1", "ln_2"),
    ("norm1", "norm2"),
)
"""Of a block, before attention and before its MLP."""
LAYERS, LAYER_NORM = "layer", "layer_norm"
"""T5's blocks hold a row of layers, each with a norm before it."""
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm")
_FIX = (
    "it is for blocks like those of GPT, Llama, T5 and Mixtral; leave it out, or give plan= with torch's "
    "SequenceParallel"
)


def join(name: str, inner: str) -> str:
    return f"{name}.{inner}".strip(".")


def sequence_plan(model: nn.Module, layers: Plan) -> Plan:
    """Of norms and of what stands between blocks, beside the plan of what is cut inside them.

    ValueError where no block is known, or where a part of the sequence would meet something that is not known to work
    on it.
    """
    found: Plan = {}
    rows: list[str] = []  # of blocks
    for name, module in model.named_modules():
        for inner, blocks in module.named_children():
            if not isinstance(blocks, nn.ModuleList) or not any(_norms_of(block) for block in blocks):
                continue
            path = join(name, inner)
            for number, block in enumerate(blocks):
                for norm in _norms_of(block):
                    found[f"{path}.{number}.{norm}"] = Several(SummedGradients(), GatheredSequence(as_dtensor=True))
                _check_block(f"{path}.{number}", block, {**layers, **found})
            final = next((norm for norm in FINAL_NORMS if norm in module._modules), None)
            if final is None:
                raise ValueError(f"sequence_parallel: '{name or 'the model'}' has no norm after its blocks: {_FIX}")
            found[f"{path}.0"] = CutSequence()
            found[join(name, final)] = Several(SummedGradients(), GatheredSequence(as_dtensor=False))
            rows.append(f"{path}.")
    if not found:
        raise ValueError(f"sequence_parallel: no block of this {type(model).__name__} is known: {_FIX}")
    outside = next((path for path, style in layers.items() if _cuts(style) and not path.startswith(tuple(rows))), None)
    if outside is not None:
        raise ValueError(f"sequence_parallel: '{outside}' is outside of the known blocks, and would get all: {_FIX}")
    return found


def _cuts(style: ParallelStyle) -> bool:
    """Whether a layer gives a part of the sequence, which the block around it expects."""
    if isinstance(style, RowwiseParallel):
        return SEQUENCE in style.output_layouts
    return isinstance(style, RoutedTokens) or (isinstance(style, CutLayer) and style.gives == SEQUENCE)


def _norms_of(block: nn.Module) -> tuple[str, ...]:
    """Names of the norms before each layer of a block; none where it is not known."""
    for pair in NORMS:
        if all(norm in block._modules for norm in pair):
            return pair
    layers = block._modules.get(LAYERS)
    if isinstance(layers, nn.ModuleList) and all(LAYER_NORM in layer._modules for layer in layers):
        return tuple(f"{LAYERS}.{number}.{LAYER_NORM}" for number in range(len(layers)))
    return ()


def _check_block(name: str, block: nn.Module, plan: Plan) -> None:
    """All that has parameters is cut or one of the norms; anything else would see a part and take it for all."""
    for inner, module in block.named_modules():
        path = join(name, inner)
        style = plan.get(path)
        first = style.styles[0] if isinstance(style, Several) else style
        is_covered = style is not None and not isinstance(style, (SharedInput, LocalCounts))
        if isinstance(first, Experts):
            is_covered = isinstance(plan.get(path.rpartition(".")[0]), RoutedTokens)
        if isinstance(style, RowwiseParallel):  # in a Sequential it gives the whole, since it may stand anywhere
            is_covered = _cuts(style)
        if module._parameters and not is_covered:
            raise ValueError(f"sequence_parallel: '{path}' is not known to work on a part: {_FIX}")
