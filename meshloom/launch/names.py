"""Names of ranks, meshes and GPUs in messages."""

from __future__ import annotations

from meshloom.core.mesh import AXES, Axis, Mesh
from meshloom.core.units import format_count


def rank_name(rank: int, mesh: Mesh | None) -> str:
    """A rank with its place, if the mesh is known.

    >>> rank_name(3, Mesh(dp=4)), rank_name(3, None)
    ('rank 3 (dp=3)', 'rank 3')
    """
    return f"rank {rank} ({mesh.place(rank)})" if mesh and rank < mesh.size else f"rank {rank}"


def used_axes(mesh: Mesh) -> list[Axis]:
    """The axes that have more than one rank, and dp."""
    return [axis for axis in AXES if axis == "dp" or getattr(mesh, axis) > 1]


def sizes(mesh: Mesh) -> str:
    """The sizes of the axes in use.

    >>> sizes(Mesh(dp=2, tp=4))
    'dp=2,tp=4'
    """
    return ",".join(f"{axis}={getattr(mesh, axis)}" for axis in used_axes(mesh))


def visible_gpus(count: int) -> str:
    """As a reason.

    >>> visible_gpus(0), visible_gpus(1), visible_gpus(2)
    ('no GPU is visible', '1 GPU is visible', '2 GPUs are visible')
    """
    return f"{format_count(count, 'GPU') if count else 'no GPU'} {'is' if count < 2 else 'are'} visible"


def capital(text: str) -> str:
    """`text` as the start of a sentence."""
    return text[:1].upper() + text[1:]
