"""Which dtype each tensor of a model has: in compute, on the wire, where gradients add up, and in the optimizer.

          compute       reduction, accumulation     master        moments
bf16      bf16          fp32                        fp32          fp32
fp16      fp16          fp32                        fp32          fp32     with a loss scale
fp32      fp32          fp32                        (the same)    fp32
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zerofold.loss_scale import LossScale

Keep = type[nn.Module] | str | Callable[[str, nn.Module | nn.Parameter], bool]
"""What stays in fp32: a module class, a name or pattern of modules or parameters, or a predicate (name, it)."""

_COMPUTE = (torch.float32, torch.bfloat16, torch.float16)
_STATES = (torch.float32, torch.bfloat16)


class Dtypes(NamedTuple):
    """The dtypes of one parameter."""

    compute: torch.dtype
    master: torch.dtype  # what the optimizer changes; another tensor where it differs from compute
    reduction: torch.dtype
    accumulation: torch.dtype

    @property
    def has_master(self) -> bool:
        return self.compute is not self.master

    @property
    def is_plain(self) -> bool:
        """One dtype for everything."""
        return self.compute is self.master is self.reduction is self.accumulation

    @property
    def smallest_itemsize(self) -> int:
        return min(self.compute.itemsize, self.master.itemsize)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A dtype policy. `precision="bf16"` is short for `Precision(parameters=torch.bfloat16)`, and so on.

    parameters    dtype of forward and backward; None leaves every parameter as it is, with no master
    reduction     dtype of gradients on the wire; fp32 unless given
    accumulation  dtype in which gradients add up; fp32 unless given
    buffers       dtype of floating-point buffers; None leaves them as they are
    outputs       dtype of the model's floating-point outputs; None leaves them, except that fp16 gives fp32
    keep          modules or parameters that stay in fp32: classes, names (with * and ?), predicates (name, it). A
                  module kept so gets fp32 inputs, and what comes out goes on in the compute dtype. By default batch
                  norms, whose running statistics are fp32 buffers
    master        fp32; or bf16, written with stochastic rounding: 4 bytes a parameter less, or 2 at stage 3
    moments       fp32; or bf16, written with stochastic rounding: 4 bytes a parameter less
    loss_scale    for fp16; by default dynamic
    tf32          fp32 matrix products on TF32 cores: torch's own switch, for the whole process, until `zf.close`

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    >>> policy = zf.Precision(parameters=torch.bfloat16, keep=[torch.nn.LayerNorm])
    >>> model = zf.shard(model, stage=1, precision=policy)
    >>> model(torch.ones(2, 64)).dtype, zf.full(model[1].weight).dtype
    (torch.bfloat16, torch.float32)
    >>> zf.close(model)
    """

    parameters: torch.dtype | None = None
    reduction: torch.dtype | None = None
    accumulation: torch.dtype | None = None
    buffers: torch.dtype | None = None
    outputs: torch.dtype | None = None
    keep: Sequence[Keep] | None = None
    master: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32
    loss_scale: LossScale | None = field(default=None)
    tf32: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("parameters", (None, *_COMPUTE)),
            ("reduction", (None, *_COMPUTE)),
            ("accumulation", (None, *_STATES)),
            ("master", _STATES),
            ("moments", _STATES),
        ):
            if getattr(self, name) not in allowed:
                choices = ", ".join(str(dtype) for dtype in allowed)
                raise ValueError(f"Precision: {name}={getattr(self, name)!r} is not possible; choose one of {choices}")
        for name in ("buffers", "outputs"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"Precision: {name}={dtype!r} must be a floating-point dtype, or None")
        if self.keep is not None and (isinstance(self.keep, str) or not isinstance(self.keep, Sequence)):
            raise ValueError(f"Precision: keep={self.keep!r} must be a list of classes, names or predicates")
        for rule in self.keep or ():
            if isinstance(rule, nn.Module) or not (isinstance(rule, str) or callable(rule)):
                raise ValueError(f"Precision: keep has {rule!r}; give a module class, a name or a predicate (name, it)")
        if self.keep and self.parameters in (None, torch.float32):
            raise ValueError("Precision: keep= names what stays in fp32, so parameters= must be a 16-bit dtype")
        if self.loss_scale is not None and self.parameters is not torch.float16:
            raise ValueError("Precision: loss_scale is for parameters=torch.float16; other dtypes need no scaling")
        if self.master is torch.bfloat16 and self.parameters is not torch.bfloat16:
            raise ValueError("Precision: master=torch.bfloat16 needs parameters=torch.bfloat16")
        if self.reduction is torch.float16 and self.parameters is not torch.float16:
            raise ValueError("Precision: reduction=torch.float16 needs parameters=torch.float16 and its loss scale")

    @property
    def output_dtype(self) -> torch.dtype | None:
        """fp16 outputs would round a loss's gradient before the loss scale can lift it."""
        if self.outputs is None and self.parameters is torch.float16:
            return torch.float32
        return self.outputs

    @property
    def scaling(self) -> LossScale:
        """Without fp16 the scale is 1 for ever, and only non-finite steps are counted."""
        return self.loss_scale or (LossScale() if self.parameters is torch.float16 else LossScale(static=1.0))

    @property
    def needs_one_pass(self) -> bool:
        """States that torch's own optimizers cannot keep: they do not round stochastically."""
        return torch.bfloat16 in (self.master, self.moments)

    @property
    def is_mixed(self) -> bool:
        """Forward computes in another dtype than the optimizer, for some parameters at least."""
        return self.parameters in (torch.bfloat16, torch.float16)

    @property
    def summary(self) -> str:
        """For comparing ranks: predicates are told apart by the dtypes they lead to."""
        dtypes = (self.parameters, self.reduction, self.accumulation, self.buffers, self.outputs)
        return f"precision={dtypes}, master={self.master}, moments={self.moments}, {self.loss_scale}, tf32={self.tf32}"

    def keeps(self, name: str, it: nn.Module | nn.Parameter) -> bool:
        return any(_matches(rule, name, it) for rule in self._rules)

    @property
    def _rules(self) -> Sequence[Keep]:
        if not self.is_mixed:
            return ()
        return (nn.modules.batchnorm._BatchNorm,) if self.keep is None else self.keep

    def dtypes(self, parameter: Tensor, *, is_kept: bool) -> Dtypes:
        """For one parameter as it stands now."""
        own = parameter.dtype
        if self.parameters is None or not parameter.is_floating_point():
            return Dtypes(own, own, self.reduction or own, self.accumulation or own)
        compute = torch.float32 if is_kept else self.parameters
        if not parameter.requires_grad:  # nothing will be added to it, so nothing would get lost
            return Dtypes(compute, compute, compute, compute)
        master = torch.float64 if own is torch.float64 else torch.promote_types(compute, self.master)
        reduction = torch.float32 if is_kept or self.reduction is None else self.reduction
        accumulation = torch.float32 if is_kept or self.accumulation is None else self.accumulation
        return Dtypes(compute, master, reduction, accumulation)

    def check_rules(self, model: nn.Module) -> None:
        """Every rule must name something, or a slip of the pen would go unnoticed."""
        everything = [*model.named_modules(), *model.named_parameters(remove_duplicate=False)]
        for rule in self.keep or ():
            if not any(_matches(rule, name, it) for name, it in everything):
                shown = rule if isinstance(rule, str) else getattr(rule, "__name__", rule)
                raise ValueError(f"Precision: keep={shown!r} matches no module and no parameter of the model")

    def kept_modules(self, model: nn.Module) -> list[nn.Module]:
        """The outermost modules that a rule names, with what is inside them."""
        found: list[nn.Module] = []

        def look(name: str, module: nn.Module) -> None:
            if self.keeps(name, module):
                found.append(module)
                return
            for child_name, child in module.named_children():
                look(f"{name}.{child_name}" if name else child_name, child)

        if self._rules:
            look("", model)
        return found


_NAMED = {
    "fp32": Precision(parameters=torch.float32),
    "tf32": Precision(parameters=torch.float32, tf32=True),
    "bf16": Precision(parameters=torch.bfloat16),
    "fp16": Precision(parameters=torch.float16),
}


def policy_of(precision: str | Precision | None) -> Precision:
    """The policy for a name; None leaves the model as it is.

    >>> policy_of("bf16").parameters
    torch.bfloat16
    """
    if precision is None:
        return Precision()
    if isinstance(precision, Precision):
        return precision
    if not isinstance(precision, str) or precision not in _NAMED:
        raise ValueError(
            f"precision={precision!r} does not exist; choose one of {', '.join(_NAMED)}, or a zf.Precision"
        )
    return _NAMED[precision]


def _matches(rule: Keep, name: str, it: nn.Module | nn.Parameter) -> bool:
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    if isinstance(rule, type):
        return isinstance(it, rule)
    return bool(rule(name, it))
