"""Which ranks share a model since the last `zf.initialize`, for DeepSpeed's functions that ask without naming one."""

from __future__ import annotations

from contextvars import ContextVar

from zerofold.parallel.mesh import DATA, REPLICATE, Mesh

_MESH: ContextVar[Mesh | None] = ContextVar("zerofold_mesh", default=None)


def mesh_in_use() -> Mesh | None:
    """None: every rank has other samples.

    >>> mesh_in_use() is None
    True
    """
    return _MESH.get()


def use_mesh(mesh: Mesh | None) -> None:
    """
    >>> import zerofold as zf
    >>> use_mesh(zf.mesh(tensor=1)); mesh_in_use().tensor
    1
    >>> use_mesh(None)
    """
    _MESH.set(mesh)


def data_rank(mesh: Mesh) -> int:
    """Of this rank among those with other samples; ranks that share a model have the same.

    >>> import zerofold as zf
    >>> data_rank(zf.mesh(data=1))
    0
    """
    place = mesh.coordinate
    return place[REPLICATE] * mesh.data + place[DATA]
