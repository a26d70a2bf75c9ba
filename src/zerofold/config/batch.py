"""train_batch_size = micro-batch per rank x accumulation steps x ranks: two of the three numbers give the third."""

from __future__ import annotations

from typing import NamedTuple

from zerofold.config.checking import Checked
from zerofold.config.errors import ConfigError, wrong
from zerofold.config.kinds import AUTO

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class Batch(NamedTuple):
    train: int
    micro: int
    accumulate: int

    def line(self, world: int) -> str:
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        return f"{TRAIN} {self.train} = {self.micro} per rank x {self.accumulate} accumulated x {ranks}"


def resolve_batch(checked: Checked, *, world: int, batch: int | None) -> Batch:
    """The three numbers; `batch` is the micro-batch size of a data loader, used where the config has none."""
    train, micro, steps = (None if checked.is_auto(key) else checked[key] for key in (TRAIN, MICRO, STEPS))
    from_loader = micro is None and batch is not None
    if from_loader:
        micro = batch
    if train is None:
        found = Batch(0, micro or 1, steps or 1)
        found = found._replace(train=found.micro * found.accumulate * world)
    elif micro is not None and steps is not None:
        found = Batch(train, micro, steps)
        if train != micro * steps * world:
            raise _not_equal(found, world)
    elif micro is not None:
        found = Batch(train, micro, _divide(train, micro, world, f"micro {micro}{' (the data loader)' * from_loader}"))
    else:
        accumulate = steps or 1
        found = Batch(train, _divide(train, accumulate, world, f"accumulation {accumulate}"), accumulate)
    _say(checked, found, world=world, from_loader=from_loader)
    return found


def _say(checked: Checked, found: Batch, *, world: int, from_loader: bool) -> None:
    nothing_known = all(checked[key] in (None, AUTO) for key in (TRAIN, MICRO, STEPS)) and not from_loader
    derived = found.line(world).split(" = ")[1]
    texts = {
        TRAIN: derived,
        MICRO: "from the data loader" if from_loader else "one sample" if nothing_known else "from the other two",
        STEPS: "from the other two" if checked[TRAIN] not in (None, AUTO) else "no accumulation",
    }
    for key, value in zip((TRAIN, MICRO, STEPS), found, strict=True):
        if checked.is_auto(key) or (checked[key] is None and nothing_known):
            checked.settle(key, value, texts[key])
        checked.values[key] = value


def _divide(train: int, part: int, world: int, words: str) -> int:
    share = part * world
    if train % share:
        below, above = train // share * share, (train // share + 1) * share
        choices = f"{below} or {above}" if below else f"{above}"
        raise wrong(
            TRAIN,
            train,
            f"use {choices}, or change the other numbers",
            why=f"is not divisible by {words} x {world} ranks = {share}",
        )
    return train // share


def _not_equal(found: Batch, world: int) -> ConfigError:
    product = found.micro * found.accumulate * world
    return wrong(
        TRAIN,
        found.train,
        f"make {TRAIN} {product}, or leave one of {TRAIN}, {MICRO}, {STEPS} out",
        why=f"is not micro {found.micro} x accumulation {found.accumulate} x {world} ranks = {product}",
    )
