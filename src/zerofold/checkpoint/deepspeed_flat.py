"""DeepSpeed's flat partitions, cut back into parameters. Names and shapes stand beside them, in the model's file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerofold.checkpoint.contents import CheckpointError, OptimizerContents, Stored, numel
from zerofold.checkpoint.ondisk import Joined, Piece, concatenated
from zerofold.checkpoint.unpickle import plain

Shapes = Mapping[str, tuple[int, ...]]
Cut = Callable[[int, Sequence[Stored]], dict[str, Stored]]  # a flat group's number and its pieces, rank by rank


@dataclass(frozen=True)
class Partitions:
    """What the ranks' optimizer files hold, group by group as DeepSpeed flattened them."""

    masters: list[list[Stored]]  # by flat group and rank
    optimizers: list[dict[str, Any]]  # the plain optimizer's state_dict, by rank
    shapes: list[Shapes]  # by flat group, in the order of the flat space
    cut: Cut


def read_partitions(ranks: list[dict[str, Any]], shapes: Any, where: str) -> Partitions:
    first = ranks[0]
    by_parameter = "fp32_flat_groups" in first
    key = "fp32_flat_groups" if by_parameter else "single_partition_of_fp32_groups"
    if key not in first:
        raise CheckpointError(
            f"{where} holds optimizer files without {key}: a form of DeepSpeed that is not known here"
        )
    if not shapes:
        raise CheckpointError(
            f"{where} does not say which parameters are in its flat partitions: the model's file has no param_shapes"
        )
    groups = [_checked_shapes(group) for group in shapes]
    if any(len(rank[key]) != len(groups) for rank in ranks):
        raise CheckpointError(
            f"{where} has {len(groups)} groups of names and another number of flat groups: it is damaged"
        )
    masters = [[rank[key][number] for rank in ranks] for number in range(len(groups))]
    states = [_optimizer_state(rank) for rank in ranks]
    if by_parameter:
        return Partitions(masters, states, groups, lambda number, pieces: cut_each(pieces, groups[number], where=where))
    # Newer files also hold param_slice_mappings. They are wrong where gradients were dealt round robin: not used.
    paddings = first.get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    tails = [sum(rank["group_paddings"][n] for rank in ranks if "group_paddings" in rank) for n in range(len(groups))]

    def cut(number: int, pieces: Sequence[Stored]) -> dict[str, Stored]:
        return cut_across(pieces, groups[number], paddings[number], tail=tails[number], where=where)

    return Partitions(masters, states, groups, cut)


def cut_across(
    pieces: Sequence[Stored], shapes: Shapes, paddings: Sequence[int], *, tail: int, where: str
) -> dict[str, Stored]:
    """Stages 1 and 2: the group's parameters make one flat space, and the ranks have even stretches of it.

    rank 0 [ a a a a b b ] rank 1 [ b c c c . . ]      the dots are padding, which some files leave out
    """
    flat = concatenated(pieces, where=where)
    result: dict[str, Stored] = {}
    offset = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        count = math.prod(shape)
        result[name] = _window(flat, offset, count, shape, name, where)
        offset += count + padding
    if numel(flat) > offset + tail:
        raise CheckpointError(
            f"{where} holds {numel(flat)} elements in a flat group whose parameters and padding have {offset + tail}: "
            "the files are of different runs, or damaged"
        )
    return result


def cut_each(pieces: Sequence[Stored], shapes: Shapes, *, where: str) -> dict[str, Stored]:
    """Stage 3: each parameter is cut over the ranks by itself, and a rank's pieces stand one after another.

    rank 0 [ a a | b b | c ] rank 1 [ a . | b b | c ]
    """
    world = len(pieces)
    result: dict[str, Stored] = {}
    offset = 0
    for name, shape in shapes.items():
        share = -(-math.prod(shape) // world)
        if any(offset + share > numel(piece) for piece in pieces):
            raise _too_short(name, where)
        parts = [Piece(piece, offset, offset + share) for piece in pieces]
        result[name] = Joined(parts, shape, where=f"{name} in {where}")
        offset += share
    if any(numel(piece) != offset for piece in pieces):
        raise CheckpointError(
            f"{where} holds {numel(pieces[0])} elements per rank where its parameters need {offset}: they were cut "
            "over fewer ranks (MiCS), or a file is damaged; convert it with DeepSpeed's ds_to_universal.py first"
        )
    return result


def _window(flat: Stored, offset: int, count: int, shape: tuple[int, ...], name: str, where: str) -> Joined:
    if offset < 0 or offset + count > numel(flat):
        raise _too_short(name, where)
    return Joined([Piece(flat, offset, offset + count)], shape, where=f"{name} in {where}")


def _too_short(name: str, where: str) -> CheckpointError:
    return CheckpointError(f"the flat partitions in {where} end before {name}: a file is damaged or of another run")


def read_optimizer(partitions: Partitions, where: str) -> OptimizerContents:
    """Moments and counters by parameter name, cut as the masters are."""
    groups, states = [], {name: dict[str, Any]() for group in partitions.shapes for name in group}
    for group in partitions.optimizers[0]["param_groups"]:
        flat_groups = group["params"]
        names = [name for number in flat_groups for name in partitions.shapes[number]]
        groups.append(
            {**plain({key: value for key, value in group.items() if key != "params"}, where), "params": names}
        )
        for number in flat_groups:
            of_ranks = [optimizer["state"].get(number, {}) for optimizer in partitions.optimizers]
            for key, value in of_ranks[0].items():
                for name, state in _state(key, value, of_ranks, number, partitions, where).items():
                    states[name][key] = state
    return OptimizerContents(groups, {name: state for name, state in states.items() if state})


def _state(
    key: str, value: Any, of_ranks: list[dict[str, Any]], number: int, partitions: Partitions, where: str
) -> dict[str, Any]:
    """One state of a flat group: a number is the same for all its parameters, a tensor is cut."""
    shape = getattr(value, "shape", ())
    if shape == ():
        return dict.fromkeys(partitions.shapes[number], value if hasattr(value, "shape") else plain(value, where))
    if len(shape) != 1 or any(key not in state for state in of_ranks):
        raise CheckpointError(f"{where} holds {key} of shape {list(shape)}, which cannot be divided among parameters")
    return partitions.cut(number, [state[key] for state in of_ranks])


def _optimizer_state(rank: dict[str, Any]) -> dict[str, Any]:
    state = rank.get("base_optimizer_state", rank.get("optimizer_state_dict"))
    if isinstance(state, list):  # DeepSpeed's elastic form: states alone, group by group
        groups = [{"params": [number]} for number in range(len(state))]
        return {"state": dict(enumerate(state)), "param_groups": groups}
    return state or {"state": {}, "param_groups": [{"params": list(range(len(rank["fp32_flat_groups"])))}]}


def _checked_shapes(group: Any) -> Shapes:
    for name, shape in group.items():
        if not isinstance(name, str) or not all(type(size) is int and 0 <= size < 2**62 for size in shape):
            raise ValueError(f"{name} has the shape {shape}")
    return {name: tuple(shape) for name, shape in group.items()}
