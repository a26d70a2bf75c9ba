"""What the ranks of a tensor axis must have alike: random numbers and batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerofold.comm import Comm
from zerofold.engine import Engine
from zerofold.fingerprints import combine, fingerprint_tensor
from zerofold.memory import Done
from zerofold.nested import tensors_in

_UNIT = "inputs of a forward"
_COMPARED = 2**14  # elements of a tensor, spread over it, after the first forward: other samples differ all over


@contextmanager
def own_random_state(axis: DeviceMesh) -> Iterator[None]:
    """torch gives all ranks the random state of the first when it makes its first DTensor: here it comes back."""
    before = [module.get_rng_state() for module in _generators(axis)]
    try:
        yield
    finally:
        for module, state in zip(_generators(axis), before, strict=True):
            module.set_rng_state(state)


def share_random_state(axis: DeviceMesh) -> None:
    """The first rank's, so that what all hold alike is dropped alike."""
    first = dist.get_global_rank(axis.get_group(), 0)
    for module in _generators(axis):
        state = module.get_rng_state()
        sent = state.to(axis.device_type)
        dist.broadcast(sent, first, group=axis.get_group())
        module.set_rng_state(sent.to(state.device))


def _generators(axis: DeviceMesh) -> Iterator[Any]:
    yield torch.random
    if axis.device_type != "cpu":
        yield torch.get_device_module(axis.device_type)


class SameInputs:
    """Before each forward of a model: the ranks of its tensor axis look whether they are at the same one.

    A sampler over all ranks gives each its own batch, and the sums over ranks would then be sums of nothing sensible;
    for tensors of other shapes the ranks would wait for each other for ever.

    every forward   one message over the CPU: in which mode it is, how many parameters are trained, shapes and values of
                    what it is given
    the first       random states as well
    in a pipeline   the first alone: the pipeline looks once for all micro-batches of a step (`Streams`)

    Values that are on a device are told with the next forward, since to read them at once would wait for the device.
    """

    def __init__(self, model: nn.Module, axis: DeviceMesh, comm: Comm) -> None:
        """`comm`: the ranks of the axis, by the CPU. Once the model has an engine, that one's takes its place, whose
        calls are watched: a rank that is alone in a forward is named."""
        self.axis, self._comm = axis, comm
        self.at_hand = ("cpu",)
        """Kinds of devices whose values are told at once."""
        self._has_looked = False
        self._later: tuple[Tensor, Done] | None = None  # fingerprints on their way to the host, and when they are there
        hook = torch.compiler.disable(self.look, reason="what it compares is on the host")
        model.register_forward_pre_hook(hook, with_kwargs=True)

    def look(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        is_first, self._has_looked = not self._has_looked, True
        engine = getattr(model, "_zerofold_engine", None)
        comm = self._comm
        if isinstance(engine, Engine) and engine.pipeline is None:
            comm = engine.groups.model or comm
        elif isinstance(engine, Engine) and not is_first:
            return
        tensors = list(tensors_in((args, kwargs)))
        seen = _Seen(_mode(model), _trained(model), _shapes(tensors), *self._values(tensors, at_once=is_first))
        state = checksum([module.get_rng_state() for module in _generators(self.axis)]) if is_first else 0
        numbers = [
            zlib.crc32(f"{seen.mode} {seen.trained} {seen.shapes}".encode()),
            seen.values,
            seen.values_before,
            state,
        ]
        told = torch.tensor([*numbers, *(-number for number in numbers)])
        comm.all_reduce(told, unit=_UNIT, op=dist.ReduceOp.MAX).wait()
        *same_inputs, same_state = (told[:4] == -told[4:]).tolist()
        if not all(same_inputs):
            raise ValueError(_difference(comm.global_ranks, comm.all_gather_objects(seen, unit=_UNIT)))
        if not same_state and model.training and _drops(model):
            raise ValueError(
                f"ranks {', '.join(map(str, comm.global_ranks))} share the inside of every layer and would draw "
                "different dropout masks: seed them alike, by mesh.coordinate['data']"
            )

    def _values(self, tensors: Sequence[Tensor], *, at_once: bool) -> tuple[int, int]:
        """Of these, and of those of the forward before that have been on a device."""
        before, self._later = self._later, None
        found: dict[bool, list[Tensor]] = {True: [], False: []}
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.device.type != "meta" and not isinstance(tensor, DTensor):
                flat = tensor.detach().reshape(-1)
                every = 1 if at_once else -(-max(1, flat.numel()) // _COMPARED)
                found[at_once or tensor.device.type in self.at_hand].append(fingerprint_tensor(flat[::every]))
        if found[False]:
            kept = torch.stack(found[False]).to("cpu", non_blocking=True)
            is_cuda = found[False][0].is_cuda
            self._later = kept, Done(torch.cuda.current_stream().record_event() if is_cuda else None)
        if before is not None:
            before[1].finish()
        late = [] if before is None else before[0].tolist()
        return combine(*map(int, found[True])) // 4, combine(*late) // 4  # so that they fit below zero as well


class _Seen(NamedTuple):
    """What one rank is given."""

    mode: str
    trained: int  # parameters: one that a rank alone has frozen would differ from then on
    shapes: str
    values: int
    values_before: int  # in the forward before, as far as they have been on a device


def _mode(model: nn.Module) -> str:
    gradients = "with" if torch.is_grad_enabled() else "without"
    return f"{'training' if model.training else 'evaluation'} {gradients} gradients"


def _trained(model: nn.Module) -> int:
    return sum(parameter.requires_grad for parameter in model.parameters())


def _shapes(tensors: Sequence[Tensor]) -> str:
    """In an order of its own: keyword arguments may come in any."""
    return " and ".join(sorted(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)) or "no tensor"


def _difference(ranks: Sequence[int], seen: Sequence[_Seen]) -> str:
    first, odd = seen[0], next(index for index, each in enumerate(seen) if each != seen[0])
    here, there, other = ranks[0], ranks[odd], seen[odd]
    what, fix = "got different inputs", "give them the same batch, chosen by mesh.coordinate['data']"
    if first.mode != other.mode:
        what, fix = "are at different forwards", "all of them must call it alike, also an evaluation"
        how = f"rank {here} is in {first.mode}, rank {there} in {other.mode}"
    elif first.trained != other.trained:
        what, fix = "train different parameters", "freeze and thaw the same ones on all of them"
        how = f"rank {here} trains {first.trained} of them, rank {there} {other.trained}"
    elif first.shapes != other.shapes:
        how = f"rank {here} has {first.shapes}, rank {there} has {other.shapes}"
    else:
        when = "" if first.values != other.values else " in the forward before this one"
        how = f"rank {there} has other values in its {other.shapes} than rank {here}{when}"
    return f"ranks {', '.join(map(str, ranks))} share the inside of every layer and {what}: {how}; {fix}"


def checksum(values: Any) -> int:
    """Of all tensors in it.

    >>> checksum({"tokens": torch.tensor([1, 2])}) == checksum([torch.tensor([1, 2])])
    True
    """
    return sum(zlib.crc32(_bytes(tensor)) for tensor in tensors_in(values))


def _bytes(tensor: Tensor) -> bytes:
    if tensor.device.type == "meta":
        return b""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _drops(model: nn.Module) -> bool:
    """Whether any module has a probability to drop with, under the names that torch and Hugging Face use."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False
