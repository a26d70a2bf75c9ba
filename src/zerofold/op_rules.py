"""What a torch operator does to its arguments, as far as tensors that are cut over ranks must know."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch


class Kind(Enum):
    ELEMENTWISE = "elementwise"
    LISTS = "foreach or fused"
    SAME_DATA = "another name for the same data"
    REFUSED = "needs the whole tensor"


class OpRule(NamedTuple):
    kind: Kind
    written: tuple[int | str, ...]  # positions or names of the arguments it changes
    returns_written: bool
    zeroes: bool
    draws: bool  # fills its first argument at random
    summarises: bool  # one argument, in a way that initialisers do


# Elementwise in effect though torch does not tag them so.
_ALSO_ELEMENTWISE = frozenset(
    {"clone", "copy_", "zero_", "fill_", "zeros_like", "ones_like", "empty_like", "full_like", "_to_copy"}
    | {"index_put_", "masked_fill_", "masked_fill"}
)


_SUMMARIES = frozenset({"any", "all", "sum", "mean", "std", "var", "min", "max"})
_UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"  # torch.amp.GradScaler's


@cache
def rule_of(func: Any) -> OpRule:
    schema = func._schema
    name = schema.name.split("::")[1]
    written = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if name in ("detach", "alias"):
        kind = Kind.SAME_DATA
    elif name.startswith(("_foreach_", "_fused_", _UNSCALES)) and name != "_foreach_norm":
        kind = Kind.LISTS
    elif name in _ALSO_ELEMENTWISE or torch.Tag.pointwise in func.tags:
        kind = Kind.ELEMENTWISE
    else:
        kind = Kind.REFUSED
    draws = written == (0,) and torch.Tag.nondeterministic_seeded in func.tags
    zeroes = name in ("zero_", "_foreach_zero_")
    return OpRule(kind, written, bool(written) and len(schema.returns) > 0, zeroes, draws, name in _SUMMARIES)
