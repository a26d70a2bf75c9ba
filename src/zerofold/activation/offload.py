"""zf.offload_activations: what autograd keeps of a forward waits for backward on the host or on a disk."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zerofold.activation.held import Held
from zerofold.activation.store import Block, CheckpointStore, Place
from zerofold.activation.wishes import check_model, check_path
from zerofold.engine import Engine
from zerofold.offload.wishes import read_size
from zerofold.placement import Tier
from zerofold.sharded import ShardedTensor

ON_MODEL = "_zerofold_activations"
TOGETHER = 64 * 2**20
"""Bytes that come up one group ahead of their use: enough to hide the copies, little on the device."""


@contextmanager
def offload_activations(
    model: nn.Module | None = None,
    *,
    above: int | str = "1MiB",
    keep: str = "host",
    path: str | os.PathLike[str] | None = None,
    together: int | str = TOGETHER,
) -> Iterator[CheckpointStore]:
    """Inside, each tensor of at least `above` bytes that autograd saves for backward leaves the device after its use,
    and comes back before backward wants it. The numbers stay as they are, to the bit.

    model     whose parameters, gathered or not, and buffers are left where they are; Parameters and views of them are
              in any case. Its ledger has the bytes that are kept.
    keep      "host" (pinned memory) or "nvme", with `path` the folder for it
    together  bytes that come back ahead of their use. The last two such groups stay on the device until backward

    The backward may come inside the `with` or after it. Memory is used again in every forward inside one `with`, so
    put it around the training loop. Checkpoints may be used inside: then it is their inputs that leave.

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    >>> with zf.offload_activations(model, above="1KiB") as store:
    ...     loss = model(torch.ones(16, 64)).sum()
    ...     kept = store.nbytes["host"]
    ...     loss.backward()
    >>> kept  # the input, and what tanh made, which the last layer takes as well
    8192
    """
    if keep == "device":
        raise ValueError('offload_activations: keep="device" would move nothing: use "host" or "nvme"')
    if keep not in (Tier.HOST.value, Tier.NVME.value):
        raise ValueError(f'offload_activations: keep={keep!r}: use "host" or "nvme"')
    if model is not None:
        check_model("offload_activations", model)
    check_path(keep, path)
    store = CheckpointStore(keep, path=path)
    if model is not None:
        _held_of(model).add(store)
    saver = _Saver(store, model, read_size("above", above), read_size("together", together))
    with saved_tensors_hooks(saver.pack, store.unpack):
        yield store


class _Saver:
    """Decides what leaves. Tensors saved one after the other come back as one group."""

    def __init__(self, store: CheckpointStore, model: nn.Module | None, above: int, together: int) -> None:
        self._store, self._above, self._together = store, above, together
        self._device = _device_of(model)
        self._homes = _homes_in(model)
        self._open: weakref.ref[Block] | None = None  # its tensors keep it, and go with their graph
        self._nbytes = 0

    def pack(self, tensor: Tensor) -> Tensor | Place:
        if not self._leaves(tensor):
            return tensor
        block = None if self._open is None else self._open()
        # To a group that backward has come to nothing is added: it would stay until the backward of another forward.
        if block is None or block.is_wanted or self._nbytes + tensor.nbytes > self._together:
            block, self._nbytes = self._store.begin(), 0
            self._open = weakref.ref(block)
        self._nbytes += tensor.nbytes
        return self._store.put(block, tensor)

    def _leaves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.nbytes < self._above:
            return False
        if tensor.device.type != self._device.type or isinstance(tensor._base, nn.Parameter | ShardedTensor):
            return False
        storage = tensor.untyped_storage()
        is_expanded = storage.nbytes() < tensor.nbytes  # a copy would be larger than what goes
        return not is_expanded and storage._cdata not in self._homes


def _held_of(model: nn.Module) -> Held:
    """Of this model, in the `with`s of its life together. Before it is sharded or after, the ledger finds it there."""
    engine = getattr(model, "_zerofold_engine", None)
    model = engine.model if isinstance(engine, Engine) else model
    held = getattr(model, ON_MODEL, None)
    if not isinstance(held, Held):
        held = Held()
        setattr(model, ON_MODEL, held)
    return held


def _device_of(model: nn.Module | None) -> torch.device:
    engine = getattr(model, "_zerofold_engine", None)
    if isinstance(engine, Engine):
        return engine.device
    found = None if model is None else next((p.device for p in model.parameters()), None)
    return found or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _homes_in(model: nn.Module | None) -> set[int]:
    """Storages of parameters and buffers, and of units, whose memory comes and goes by itself."""
    if model is None:
        return set()
    own = [t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, ShardedTensor)]
    engine = getattr(model, "_zerofold_engine", None)
    slabs = engine.slabs() if isinstance(engine, Engine) else []
    tensors = [*own, *(slab.storage.tensor for slab in slabs)]
    return {tensor.untyped_storage()._cdata for tensor in tensors}
