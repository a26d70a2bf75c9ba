"""Which layers are cut, and how, in models whose layers are known by what they hold.

A layer is known by the names and sizes of its children, not by its class: most decoders of Hugging Face have Llama's
attention and MLP under names of their own. What is not known stays whole on every rank, which is right, only not cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from zerofold.parallel.sequence import Plan, join, sequence_plan
from zerofold.parallel.styles import (
    COLUMNS,
    SEQUENCE,
    WHOLE,
    CountedOnce,
    CutLayer,
    Experts,
    LocalCounts,
    RoutedTokens,
    Several,
    SharedInput,
    SummedGradients,
    VocabularyRows,
)
from zerofold.parallel.vocabulary import CutHead

FUSED = (("query_key_value", "attention_out"), ("qkv", "project"))
"""Linear layers of query, key and value as one, and what follows attention."""
GATED = ((("gate_proj", "up_proj"), "down_proj"), (("wi_0", "wi_1"), "wo"))
PLAIN = (("wi", "wo"), ("mlp_in", "mlp_out"), ("up", "down"), ("c_fc", "c_proj"))
HEADS = ("lm_head", "head")
_BETWEEN = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Dropout, nn.Identity)
"""Between two linear layers: what works on each element by itself."""


class Wish(NamedTuple):
    ranks: int  # of the tensor axis
    sequence_parallel: bool = False
    loss_parallel: bool = False

    @property
    def stream(self) -> Placement:
        """What a layer adds to."""
        return SEQUENCE if self.sequence_parallel else WHOLE


def plan_for(model: nn.Module, wish: Wish) -> Plan:
    """A style for each module that takes part, by name; ValueError where nothing is known or a number does not divide.

    >>> from torch import nn
    >>> plan = plan_for(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), Wish(ranks=2))
    >>> {name: type(style).__name__ for name, style in plan.items()}
    {'0': 'ColwiseParallel', '2': 'RowwiseParallel'}
    """
    plan: Plan = {}
    for name, module in model.named_modules():
        for style in _STYLES:
            plan.update({join(name, inner): found for inner, found in style(name, module, wish).items()})
    if not plan:
        raise ValueError(
            f"tensor={wish.ranks}: no layer of this {type(model).__name__} is known, so none can be cut: give plan=, "
            "a dict of torch's ParallelStyles by module name, for example {'up': ColwiseParallel(), 'down': "
            "RowwiseParallel()}"
        )
    words = _vocabulary(model, wish, plan)
    if wish.sequence_parallel:
        plan.update(sequence_plan(model, plan))
    plan.update(words)
    return plan


def _linears(module: nn.Module, *names: str) -> list[nn.Linear] | None:
    found = [module._modules.get(name) for name in names]
    linears = [each for each in found if isinstance(each, nn.Linear)]
    return linears if len(linears) == len(names) else None


def _is_conv(module: nn.Module | None) -> bool:
    """Hugging Face's linear layer whose weight is transposed; the name says more than it is."""
    return type(module).__name__ == "Conv1D" and module is not None and hasattr(module, "nf")


def check_divides(number: int, what: str, name: str, ranks: int) -> None:
    if number % ranks:
        fitting = next(degree for degree in range(ranks, 0, -1) if number % degree == 0)
        raise ValueError(
            f"tensor={ranks}: '{name or 'the model'}' has {number} {what}, which do not divide by {ranks}: choose "
            f"tensor={fitting}, or give a plan= that leaves it whole"
        )


def _rows(wish: Wish) -> ParallelStyle:
    return RowwiseParallel(output_layouts=wish.stream)


def _separate_attention(name: str, module: nn.Module, wish: Wish) -> Plan:
    """Llama's: its views are by the width of a head, so they fit any number of heads."""
    linears = _linears(module, "q_proj", "k_proj", "v_proj", "o_proj")
    width = getattr(module, "head_dim", None)
    if linears is None or not isinstance(width, int) or not hasattr(module, "num_key_value_groups"):
        return {}
    norms = [inner for inner, _ in module.named_children() if inner in ("q_norm", "k_norm")]
    others = {n.split(".")[0] for n, _ in module.named_parameters()} - {"q_proj", "k_proj", "v_proj", "o_proj", *norms}
    if others or any(p.shape != (width,) for norm in norms for p in module.get_submodule(norm).parameters()):
        return {}  # a norm over all heads would need the others' numbers
    check_divides(linears[0].out_features // width, "attention heads", name, wish.ranks)
    check_divides(linears[1].out_features // width, "key-value heads", name, wish.ranks)
    columns = {inner: ColwiseParallel() for inner in ("q_proj", "k_proj", "v_proj")}
    by_head: Plan = {inner: SummedGradients() for inner in norms}
    return {"": SharedInput("hidden_states"), **columns, "o_proj": _rows(wish), **by_head}


def _t5_attention(name: str, module: nn.Module, wish: Wish) -> Plan:
    linears = _linears(module, "q", "k", "v", "o")
    heads = getattr(module, "n_heads", None)
    if linears is None or not isinstance(heads, int) or not hasattr(module, "key_value_proj_dim"):
        return {}
    check_divides(heads, "attention heads", name, wish.ranks)
    whole = Several(SharedInput("hidden_states", "key_value_states"), LocalCounts("n_heads"))
    columns = {inner: ColwiseParallel() for inner in ("q", "k", "v")}
    if "relative_attention_bias" in module._modules:  # one column for each head
        columns["relative_attention_bias"] = ColwiseParallel()
    return {"": whole, **columns, "o": _rows(wish)}


def _fused_attention(name: str, module: nn.Module, wish: Wish) -> Plan:
    for fused, out in FUSED:
        linears, width = _linears(module, fused, out), getattr(module, "head_dim", None)
        if linears is not None and isinstance(width, int) and linears[0].out_features == 3 * linears[1].in_features:
            check_divides(linears[1].in_features // width, "attention heads", name, wish.ranks)
            columns = CutLayer({"weight": 0, "bias": 0}, blocks=3, takes=WHOLE, gives=None)
            return {fused: columns, out: _rows(wish)}
    return {}


def _conv_attention(name: str, module: nn.Module, wish: Wish) -> Plan:
    """GPT-2's."""
    inner, heads = module._modules, getattr(module, "num_heads", None)
    is_known = _is_conv(inner.get("c_attn")) and _is_conv(inner.get("c_proj")) and isinstance(heads, int)
    if not is_known or "q_attn" in inner or not hasattr(module, "split_size"):
        return {}
    check_divides(int(module.num_heads), "attention heads", name, wish.ranks)  # type: ignore[arg-type]
    columns = CutLayer({"weight": 1, "bias": 0}, blocks=3, takes=WHOLE, gives=None)
    return {"": LocalCounts("split_size", "num_heads"), "c_attn": columns, "c_proj": _conv_rows(wish)}


def _conv_rows(wish: Wish) -> ParallelStyle:
    return CutLayer({"weight": 0, "bias": None}, takes=COLUMNS, gives=wish.stream)


def _mlp(name: str, module: nn.Module, wish: Wish) -> Plan:
    if isinstance(module, nn.Sequential):
        return _sequential(name, module, wish)
    for (first, second), out in GATED:
        linears = _linears(module, first, second, out)
        if linears is not None and linears[0].out_features == linears[1].out_features == linears[2].in_features:
            check_divides(linears[2].in_features, "columns between its layers", name, wish.ranks)
            shared = SharedInput("hidden_states", "x")
            return {"": shared, first: ColwiseParallel(), second: ColwiseParallel(), out: _rows(wish)}
    for first, out in PLAIN:
        linears = _linears(module, first, out)
        if linears is not None and linears[0].out_features == linears[1].in_features:
            check_divides(linears[1].in_features, "columns between its layers", name, wish.ranks)
            return {first: ColwiseParallel(), out: _rows(wish)}
        conv = module._modules.get(first)
        if conv is not None and _is_conv(conv) and _is_conv(module._modules.get(out)):
            check_divides(int(conv.nf), "columns between its layers", name, wish.ranks)  # type: ignore[arg-type]
            return {first: CutLayer({"weight": 1, "bias": 0}, takes=WHOLE, gives=None), out: _conv_rows(wish)}
    return {}


def _sequential(name: str, module: nn.Sequential, wish: Wish) -> Plan:
    """Every two linear layers with nothing between them but what works on each element by itself."""
    plan: Plan = {}
    first: str | None = None
    for inner, layer in module.named_children():
        if isinstance(layer, nn.Linear) and first is None:
            first = inner
        elif isinstance(layer, nn.Linear) and first is not None:
            check_divides(layer.in_features, "columns between two layers", join(name, first), wish.ranks)
            plan |= {first: ColwiseParallel(), inner: RowwiseParallel()}
            first = None
        elif not isinstance(layer, _BETWEEN):
            first = None
    return plan


def _experts(name: str, module: nn.Module, wish: Wish) -> Plan:
    """Mixtral's, and those of others that store all experts in two parameters."""
    down = module._parameters.get("down_proj")
    if down is None or not _are_experts(module):
        return {}
    check_divides(down.shape[2], "columns in every expert", name, wish.ranks)
    counts = [LocalCounts("intermediate_dim")] if hasattr(module, "intermediate_dim") else []
    return {"": Several(Experts("gate_up_proj", "down_proj", keeps_summands=wish.sequence_parallel), *counts)}


def _are_experts(module: nn.Module) -> bool:
    up, down = module._parameters.get("gate_up_proj"), module._parameters.get("down_proj")
    if up is None or down is None or up.dim() != 3 or down.dim() != 3 or len(module._parameters) != 2:
        return False
    return up.shape[1:] == (2 * down.shape[2], down.shape[1]) and not getattr(module, "is_transposed", False)


def _routed(name: str, module: nn.Module, wish: Wish) -> Plan:
    """A router and its experts, which need whole tokens where the stream is a part of the sequence."""
    experts = module._modules.get("experts")
    if not wish.sequence_parallel or experts is None or not _are_experts(experts):
        return {}
    # What else has parameters would give no summand, or the gradient of its input on every rank.
    others = {path: p.dim() for path, p in module.named_parameters() if not path.startswith("experts.")}
    return {"": RoutedTokens(), "gate": CountedOnce()} if others == {"gate.weight": 2} else {}


def _vocabulary(model: nn.Module, wish: Wish, known: Plan) -> Plan:
    """Heads and the embeddings of the same words; whole where the words do not divide. Not what is `known`: T5's bias
    of as many distances as there are words.
    """
    embeddings = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and n not in known}
    plan: Plan = {}
    for name, head in _heads(model):
        words = head.out_features
        alike = {path: m for path, m in embeddings.items() if m.num_embeddings == words}
        same = {path: VocabularyRows() for path in alike}
        if not same or not all(map(_looks_up_alone, alike.values())):
            continue
        if wish.loss_parallel and words % wish.ranks:
            raise ValueError(
                f"loss_parallel: '{name}' has {words} words, which do not divide by tensor={wish.ranks}: leave "
                f"loss_parallel out, or pad the words to {words + -words % wish.ranks}"
            )
        if words % wish.ranks == 0:
            gives = None if wish.loss_parallel else WHOLE
            columns = CutLayer({"weight": 0, "bias": 0}, takes=WHOLE, gives=gives)
            plan |= {name: Several(columns, CutHead(words)) if wish.loss_parallel else columns, **same}
    if wish.loss_parallel and not plan:
        raise ValueError(
            f"loss_parallel: this {type(model).__name__} has no head named {' or '.join(HEADS)} over the words of an "
            "embedding: leave it out, or give plan="
        )
    return plan


def _looks_up_alone(embedding: nn.Embedding) -> bool:
    """Others count or change the rows they look up, and a rank looks up row 0 for words that it does not have."""
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def _heads(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in HEADS and isinstance(module, nn.Linear):
            yield name, module


_STYLES = (_separate_attention, _t5_attention, _fused_attention, _conv_attention, _mlp, _experts, _routed)
