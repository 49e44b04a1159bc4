"""The mesh: ranks and places are two names of the same thing, and groups cut the ranks along an axis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshloom.core.errors import PlanError
from meshloom.core.mesh import AXES, Axis, Mesh, MeshCoordinates

meshes = st.builds(Mesh, dp=st.integers(1, 5), pp=st.integers(1, 4), tp=st.integers(1, 4))
axes = st.sampled_from(AXES)


@given(meshes)
def test_rank_and_place_are_inverse(mesh: Mesh):
    assert [mesh.rank(mesh.place(rank)) for rank in range(mesh.size)] == list(range(mesh.size))
    assert len({mesh.place(rank) for rank in range(mesh.size)}) == mesh.size


@given(meshes, axes)
def test_groups_of_an_axis_partition_the_ranks(mesh: Mesh, axis: Axis):
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert {len(group) for group in groups} == {getattr(mesh, axis)}


@given(meshes, axes)
def test_a_group_differs_along_its_axis_alone_and_in_its_order(mesh: Mesh, axis: Axis):
    for group in mesh.groups(axis):
        places = [mesh.place(rank) for rank in group]
        assert [getattr(place, axis) for place in places] == list(range(getattr(mesh, axis)))
        for other in set(AXES) - {axis}:
            assert len({getattr(place, other) for place in places}) == 1
        assert all(mesh.group_of(axis, rank) == group for rank in group)


def test_tensor_parallel_ranks_are_neighbours_and_stages_farthest_apart():
    mesh = Mesh(dp=2, pp=2, tp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_place_prints_its_replica_and_what_is_not_zero():
    assert [
        str(place)
        for place in (
            MeshCoordinates(),
            MeshCoordinates(dp=3),
            MeshCoordinates(pp=2),
            MeshCoordinates(dp=1, pp=2, tp=3),
        )
    ] == [
        "dp=0",
        "dp=3",
        "dp=0,pp=2",
        "dp=1,pp=2,tp=3",
    ]


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2", None])
def test_a_size_is_a_whole_number_of_ranks(size: object):
    with pytest.raises(PlanError, match=r"^pp=.* is not a size\. Give a whole number of ranks, 1 or more\.$"):
        Mesh(pp=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_named(rank: int):
    with pytest.raises(PlanError, match=rf"^There is no rank {rank} on a mesh of 4 ranks \(0 to 3\)\.$"):
        Mesh(dp=4).place(rank)


@pytest.mark.parametrize("place", [MeshCoordinates(dp=2), MeshCoordinates(dp=-1)])
def test_a_place_outside_the_mesh_is_named(place: MeshCoordinates):
    with pytest.raises(PlanError, match=rf"^There is no place dp={place.dp} on a mesh with dp=2\.$"):
        Mesh(dp=2).rank(place)
