"""What torch.distributed.checkpoint asks of a tensor that is cut, so that it saves and reshards it: its chunks.

Its chunks are blocks of an N-dimensional tensor, and a piece is a flat range of one, which is a few blocks (`boxes`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerofold.layout import Box, boxes
from zerofold.shard_spec import ShardSpec


def chunk_list(spec: ShardSpec) -> list[Any]:
    return [_dcp().metadata.ChunkStorageMetadata(*_sizes(box)) for box in _boxes(spec)]


def write_items(name: str, spec: ShardSpec, piece: Tensor) -> list[Any]:
    dcp = _dcp()
    properties = dcp.metadata.TensorProperties.create_from_tensor(piece)
    items = []
    for box in _boxes(spec):
        offsets, sizes = _sizes(box)
        data = dcp.planner.TensorWriteData(dcp.metadata.ChunkStorageMetadata(offsets, sizes), properties, spec.shape)
        index = dcp.metadata.MetadataIndex(name, offsets)
        items.append(dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data))
    return items


def block_at(offset: Any, spec: ShardSpec, piece: Tensor) -> Tensor:
    """The block of this rank that begins there, as a view of its piece."""
    first = spec.own[0]
    for box in _boxes(spec):
        if box.offsets == tuple(offset):
            return piece.view(-1)[box.start - first : box.stop - first].view(box.sizes)
    raise ValueError(f"'{spec.name}': this rank has no block at {tuple(offset)}")


def _boxes(spec: ShardSpec) -> list[Box]:
    if spec.is_part:
        raise RuntimeError(
            f"'{spec.name}', of shape {tuple(spec.shape)}, is this rank's part of a larger parameter, which "
            "torch.distributed.checkpoint would take for all of it: use zf.save, or zf.export for the weights alone"
        )
    return list(boxes(spec.shape, *spec.own))


def _dcp() -> Any:
    import torch.distributed.checkpoint as dcp  # which takes half a second, so only who saves with it pays

    return dcp


def _sizes(box: Box) -> tuple[torch.Size, torch.Size]:
    return torch.Size(box.offsets), torch.Size(box.sizes)
