"""A process group in which this process stands for all ranks, and every collective takes its time on the wire.

What arrives has the right size and, on devices with memory, finite values: this rank's own in place of the others'.
It answers what zerofold and FSDP2 ask of a group; anything else raises torch's own "not implemented".
"""

# torch's stub lists every overload of the C++ class; torch.distributed calls the one form that is here.
# mypy: disable-error-code="override"

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.plan.wires import Wires
from zerofold.simulation.clocks import HOST, Clock, Ticket

BACKEND = "modelled"


@dataclass
class Network:
    """What all groups of one simulated world share. Its wires may be exchanged between two steps."""

    wires: Wires
    clock: Clock
    device: torch.device
    sent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Bytes that this rank has sent between devices, by collective, as a ring sends them."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """For which wires were occupied, by collective."""
    on_send: list[Callable[[], None]] = field(default_factory=list)
    """Called when a collective starts: a good moment to look which memory is there."""

    def forget(self) -> None:
        self.sent.clear()
        self.seconds.clear()


@contextmanager
def modelled_world(world: int, network: Network) -> Iterator[None]:
    """Inside, torch.distributed is initialised as rank 0 of `world` ranks on this network."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised already, and a simulation needs a world of its own: call "
            "torch.distributed.destroy_process_group() first, or simulate in another process"
        )
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda", "meta"])
    show_errors = sys.excepthook  # which torch.distributed replaces by one that puts the rank before every line
    dist.init_process_group(BACKEND, rank=0, world_size=world, store=FakeStore(), pg_options=network)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = show_errors


def _make(options: Any, network: Network | None) -> ModelledGroup:
    """torch.distributed asks for the first group, with our options, and for each further one, without."""
    if network is None:
        whole = dist.group.WORLD
        assert isinstance(whole, ModelledGroup)
        network = whole.network
    ranks = options.global_ranks_in_group or range(options.group_size)
    return ModelledGroup(options.group_rank, options.group_size, network, ranks, name=options.group_id)


class ModelledWork(dist._Work):
    """A collective under way."""

    def __init__(self, ticket: Ticket, kept: Any) -> None:
        super().__init__()
        self._ticket, self._kept = ticket, kept

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._ticket.wait()
        self._kept = None
        return True

    def is_completed(self) -> bool:
        return self._ticket.is_over()

    def is_success(self) -> bool:
        return True


class ModelledGroup(dist.ProcessGroup):
    """Rank `rank` of `size`, alone."""

    def __init__(self, rank: int, size: int, network: Network, ranks: Sequence[int], *, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows the form with a store only
        self.network, self._rank, self._size, self._name = network, rank, size, name
        self._span = network.wires.span(ranks)

    # What torch.distributed wants to know of a group.

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def group_name(self) -> str:
        """torch.distributed sets no name on groups written in Python."""
        return self._name

    def _get_backend(self, device: torch.device) -> ModelledGroup:
        return self

    # Collectives: torch 2.11 has other names than 2.13 for some.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ModelledWork:
        return self._send("all_reduce", _nbytes(tensors), tensors, times=2)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> ModelledWork:
        return self.allreduce(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> ModelledWork:
        return self._send("broadcast", _nbytes(tensors), tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> ModelledWork:
        return self._send("reduce", _nbytes(tensors), tensors)

    def barrier(self, opts: Any = None) -> ModelledWork:
        return self._send("barrier", 0, [])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ModelledWork:
        return self._gather([output], [input])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ModelledWork:
        return self._gather(outputs, inputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ModelledWork:
        def fill() -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                for part in parts:
                    part.copy_(own)

        received = [part for parts in outputs for part in parts]
        return self._send("all_gather", _nbytes(received), [*received, *inputs], fill)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ModelledWork:
        return self._reduce_scatter([output], [input])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ModelledWork:
        return self._reduce_scatter(outputs, inputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ModelledWork:
        def fill() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                output.copy_(parts[self._rank])

        sent = [part for parts in inputs for part in parts]
        return self._send("reduce_scatter", _nbytes(sent), [*outputs, *sent], fill)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> ModelledWork:
        def fill() -> None:
            if output.shape == input.shape:
                output.copy_(input)
            else:
                output.zero_()

        return self._send("all_to_all", input.nbytes, [output, input], fill)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ModelledWork:
        def fill() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                output.copy_(parts[self._rank])

        sent = [part for parts in inputs for part in parts]
        return self._send("scatter", self._size * _nbytes(outputs), [*outputs, *sent], fill)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ModelledWork:
        def fill() -> None:
            for parts, own in zip(outputs, inputs, strict=False):
                for part in parts:
                    part.copy_(own)

        received = [part for parts in outputs for part in parts]
        return self._send("gather", self._size * _nbytes(inputs), [*inputs, *received], fill)

    _allgather_base: Any = all_gather_single
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    _reduce_scatter_base: Any = reduce_scatter_single
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced
    alltoall_base: Any = all_to_all_single

    def _gather(self, outputs: list[Tensor], inputs: list[Tensor]) -> ModelledWork:
        def fill() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                rows = output.view(self._size, -1)
                # The own row is in place already, or another tensor: then it is written as well.
                is_in_place = own.data_ptr() == rows[self._rank].data_ptr()
                others = (rows[: self._rank], rows[self._rank + 1 :]) if is_in_place else (rows,)
                for some in others:
                    some.copy_(own.view(1, -1).expand_as(some))

        return self._send("all_gather", _nbytes(outputs), [*outputs, *inputs], fill)

    def _reduce_scatter(self, outputs: list[Tensor], inputs: list[Tensor]) -> ModelledWork:
        def fill() -> None:
            for output, rows in zip(outputs, inputs, strict=True):
                output.view(-1).copy_(rows.view(self._size, -1)[self._rank])

        return self._send("reduce_scatter", _nbytes(inputs), [*outputs, *inputs], fill)

    def _send(
        self,
        operation: str,
        nbytes: int,
        tensors: list[Tensor],
        fill: Callable[[], None] | None = None,
        *,
        times: int = 1,
    ) -> ModelledWork:
        """`tensors`: all that the message reads and writes, kept until somebody has waited for it."""
        network = self.network
        for look in network.on_send:
            look()
        between_hosts = not tensors or tensors[0].device.type != network.device.type
        seconds = network.wires.seconds(operation, nbytes, self._span)
        has_values = fill is not None and bool(tensors) and not tensors[0].is_meta
        ticket = network.clock.send(
            HOST if between_hosts else self._span.axis,
            "agreement" if between_hosts else operation,
            seconds,
            fill if has_values and fill is not None else _nothing,
        )
        if not between_hosts:
            sent = (nbytes if operation == "all_to_all" else nbytes * times) * (self._size - 1) / self._size
            network.sent[operation] += sent
            network.seconds[operation] += seconds
        return ModelledWork(ticket, tensors)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _nothing() -> None:
    pass
