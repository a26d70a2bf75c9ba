"""Every model of the zoo, every row of the table, every feature: zerofold beside DistributedDataParallel.

    python -m tests.matrix --write docs/matrix.md

`run_model` trains one model once under DDP and once per row, and says how far the weights are apart.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks import RankPool
from tests.zoo import ZOO, Batch, Model, batches, build
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zerofold as zf

# (row of the placement table, cut): what `zf.prepare(stage=row, cut=cut)` is given.
ROWS: list[tuple[str, str]] = [
    ("dp", "whole"),
    *((stage, "even") for stage in ("0", "1", "2", "3")),
    *((stage, "whole") for stage in ("1", "2", "3")),
    ("hsdp", "even"),
    ("hpz", "even"),
]
STEPS, CLIP = 3, 0.05


def settings_for(row: str, world: int) -> dict[str, Any]:
    """What `zf.prepare` needs besides the row and the cut: a mesh of two groups, or of groups of one rank."""
    if row not in ("hsdp", "hpz"):
        return {}
    shape = (2, world // 2) if world % 2 == 0 else (world, 1)
    return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("across", "inside"))}


@dataclass(frozen=True)
class Feature:
    """A way to train; each changes one thing about a plain step."""

    name: str
    micro_batches: int = 1
    clip: float | None = None
    reentrant: bool | None = None  # gradient checkpointing of either kind; None is without

    def suits(self, model: Model) -> bool:
        """DDP itself cannot look for unused parameters inside reentrant checkpoints."""
        return self.reentrant is None or (model.checkpoints and not (self.reentrant and model.skips))


FEATURES = {
    feature.name: feature
    for feature in (
        Feature("plain"),
        Feature("accumulate", micro_batches=2),
        Feature("clip", clip=CLIP),
        Feature("checkpoint", reentrant=False),
        Feature("checkpoint_reentrant", reentrant=True),
    )
}


@dataclass(frozen=True)
class Trained:
    """What a run leaves behind on this rank."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: list[float]
    between: list[Any]  # what was asked of the model after each step


@dataclass(frozen=True)
class Distance:
    """The largest differences from the reference: of a weight and of a loss."""

    weights: float
    losses: float


def run_case(model: str, row: str, cut: str, feature: str) -> Distance:
    """One cell of the matrix, on this rank."""
    return run_model(model, feature, [(row, cut)])[row, cut]


def run_model(
    model: str, feature: str, rows: list[tuple[str, str]] | None = None, steps: int = STEPS
) -> dict[tuple[str, str], Distance]:
    """Several rows against one reference, on this rank."""
    entry, how = ZOO[model], FEATURES[feature]
    reference = train_ddp(entry, how, steps)
    return {
        (row, cut): distance(reference, train_zerofold(entry, how, row, cut, steps))
        for row, cut in (ROWS if rows is None else rows)
    }


Question = Callable[[nn.Module, Batch], Any]


def nothing(net: nn.Module, batch: Batch) -> None:
    """What is asked of a model between steps, by default."""


def train_ddp(model: Model, feature: Feature, steps: int = STEPS, between: Question = nothing) -> Trained:
    """torch's own DistributedDataParallel with the plain optimizer."""
    net = _built(model, feature)
    wrapped = DistributedDataParallel(net, find_unused_parameters=model.skips)
    optimizer = make_optimizer(net)
    losses, answers = [], []
    for number in range(steps):
        losses += _backward(wrapped, wrapped.no_sync, _of_step(model, feature, number))
        if feature.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), feature.clip)
            assert norm > feature.clip, f"{model.name}: a clip of {feature.clip} does not bind, the norm is {norm}"
        optimizer.step()
        optimizer.zero_grad()
        answers.append(between(net, batches(model, 1, start=100 + number)[0]))
    return trained(net, losses, answers)


def train_zerofold(
    model: Model, feature: Feature, row: str, cut: str, steps: int = STEPS, between: Question = nothing
) -> Trained:
    """The same run through zf.prepare, with units found by themselves."""
    net = _built(model, feature)
    settings = settings_for(row, dist.get_world_size())
    net, optimizer = zf.prepare(net, make_optimizer(net), stage=row, cut=cut, clip=feature.clip, **settings)
    losses, answers = [], []
    for number in range(steps):
        losses += _backward(net, lambda: zf.no_sync(net), _of_step(model, feature, number))
        optimizer.step()
        optimizer.zero_grad()
        answers.append(between(net, batches(model, 1, start=100 + number)[0]))
    zf.close(net)
    return trained(net, losses, answers)


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Weight decay moves what has no gradient, if anything lets it; eps keeps rounding noise from being amplified."""
    trainable = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.1, eps=1e-4, foreach=False)


def trained(net: nn.Module, losses: list[float], between: Sequence[Any] = ()) -> Trained:
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    return Trained(weights, {name: b.clone() for name, b in net.named_buffers()}, losses, list(between))


def distance(reference: Trained, ours: Trained) -> Distance:
    losses = [abs(a - b) for a, b in zip(reference.losses, ours.losses, strict=True)]
    return Distance(largest(reference.weights, ours.weights), max(losses))


def largest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference among tensors of the same name; nan counts as infinitely far.

    A bf16 weight moves by 2^-8 of itself or not at all, where an fp32 one moves by 2^-24: its difference counts for as
    many roundings of an fp32 one.
    """
    assert first.keys() == second.keys(), f"different names: {sorted(first.keys() ^ second.keys())}"
    found = 0.0
    for name, tensor in first.items():
        if tensor.numel():
            apart = (tensor.double() - second[name].double()).abs().max().item()
            if tensor.dtype.is_floating_point:
                apart *= min(1.0, torch.finfo(torch.float32).eps / torch.finfo(tensor.dtype).eps)
            found = max(found, math.inf if math.isnan(apart) else apart)
    return found


def bounds(model: str, row: str, feature: str, world: int) -> Distance:
    """How far apart weights and losses may be."""
    # A norm over pieces is summed in another order than over whole tensors. odd_net has a transposed parameter, whose
    # gradient lies in another order in memory even where it is whole: 5e-13, and 0 with that parameter contiguous.
    sums_differently = FEATURES[feature].clip is not None and (row != "0" or model == "odd_net")
    if world <= 2 and not sums_differently:
        return Distance(0.0, 0.0)  # a sum of two numbers rounds the same in either order
    # Three bf16 gradients summed in another order may move a bf16 weight of odd_net to the next number, and that moves
    # its loss by 5e-5 and, in a step, its other weights by 2e-6 (accumulate, stage 0).
    return Distance(1e-5 if model == "odd_net" and world > 2 else 1e-6, 1e-4)


def _built(model: Model, feature: Feature) -> nn.Module:
    net: Any = build(model)
    if feature.reentrant is not None:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": feature.reentrant})
        assert any(getattr(module, "gradient_checkpointing", False) for module in net.modules())
        if feature.reentrant:
            net.enable_input_require_grads()  # a reentrant checkpoint has a backward only if an input wants one
    return net


def _of_step(model: Model, feature: Feature, number: int) -> list[Batch]:
    return batches(model, feature.micro_batches, start=number * feature.micro_batches)


def _backward(net: nn.Module, no_sync: Any, micro_batches: list[Batch]) -> list[float]:
    """Gradients of all micro-batches, communicated in the last; returns the losses."""
    losses = []
    for number, batch in enumerate(micro_batches, start=1):
        context: AbstractContextManager[Any] = nullcontext() if number == len(micro_batches) else no_sync()
        with context:
            loss = net(**batch).loss / len(micro_batches)
            loss.backward()
        losses.append(loss.item())
    return losses


def worst(per_rank: Iterable[dict[tuple[str, str], Distance]]) -> dict[tuple[str, str], Distance]:
    """Over ranks."""
    found: dict[tuple[str, str], Distance] = {}
    for cells in per_rank:
        for key, cell in cells.items():
            before = found.get(key, Distance(0.0, 0.0))
            found[key] = Distance(max(before.weights, cell.weights), max(before.losses, cell.losses))
    return found


def rows_of(world: int) -> list[tuple[str, str]]:
    """With four ranks there are two groups of two; what has no groups is shown by two and three ranks."""
    return [row for row in ROWS if row[0] in ("hsdp", "hpz")] if world == 4 else ROWS


def page(worlds: list[int], models: list[str], pool: RankPool) -> tuple[str, int]:
    """The matrix as Markdown, and how many cells are outside their bounds; runs it."""
    outside = 0
    lines = [
        "# Models against DDP",
        "",
        f"The largest difference of a weight from DistributedDataParallel's after {STEPS} steps of AdamW, over all",
        "weights and ranks; 0 means the same bits, - that there is no such run, ! that a bound is broken. Rows are",
        "models, columns are stages. hsdp and hpz have two groups of ranks, or on three ranks three.",
        "The difference of a bf16 weight (odd_net has some) counts 2^-16 of itself, as many roundings of an fp32 one.",
        "Written by `make matrix`, which fails outside the bounds; `tests/test_models.py` checks a part each time.",
    ]
    for world in worlds:
        rows = rows_of(world)
        heads = [f"{row}, whole" if cut == "whole" and row != "dp" else row for row, cut in rows]
        for feature in FEATURES.values():
            lines += [
                "",
                f"## {world} ranks, {feature.name}",
                "",
                f"| | {' | '.join(heads)} |",
                "|---" * (len(heads) + 1) + "|",
            ]
            for name in models:
                cells = ["-"] * len(rows)
                if feature.suits(ZOO[name]):
                    began = time.monotonic()
                    found = worst(pool(world, run_model, name, feature.name, rows))
                    broken = [not _is_within(found[key], bounds(name, key[0], feature.name, world)) for key in rows]
                    cells = [_cell(found[key].weights) + "!" * bad for key, bad in zip(rows, broken, strict=True)]
                    outside += sum(broken)
                    print(
                        f"{world} {feature.name} {name}: {' '.join(cells)} ({time.monotonic() - began:.1f} s)",
                        flush=True,
                    )
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n", outside


def _is_within(found: Distance, allowed: Distance) -> bool:
    return found.weights <= allowed.weights and found.losses <= allowed.losses


def _cell(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the file for the table; without it, it is printed")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO))
    options = parser.parse_args()
    pool = RankPool()
    try:
        text, outside = page(options.ranks, options.models, pool)
    finally:
        pool.close()
    if options.write:
        options.write.write_text(text)
    else:
        print(text)
    if outside:
        sys.exit(f"{outside} cells are outside their bounds")


if __name__ == "__main__":
    main()
