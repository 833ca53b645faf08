"""Grids and lines of processes on a mesh: what is refused before anything communicates."""

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.parallel.mesh_blocks import MeshBlocks
from pipeloom.parallel.placed import Placed, even, place_parameter


def test_a_grid_keeps_its_order_and_refuses_others() -> None:
    def divide() -> None:
        mesh = pl.Mesh(tp=4)
        for parts in ({"tp_row": -2, "tp_column": -2}, {"dp": 4}):
            with pytest.raises(InputError, match=r"names must be other than .* at least 1"):
                mesh.divide(**parts)
        mesh.divide(tp_row=2, tp_column=2)
        mesh.divide(tp_row=2, tp_column=2)
        place = mesh.place
        with pytest.raises(InputError, match=r"divided into .* already"):
            mesh.divide(tp_column=2, tp_row=2)
        assert mesh.place == place

    pl.run_threads(4, divide, timeout_seconds=60)


@pytest.mark.parametrize("names", [(), ("dp", "dp"), ("tp_row", "tp_row"), ("tp", "tp_row")])
def test_lines_along_no_axis_one_twice_or_both_kinds_are_refused(names: tuple[str, ...]) -> None:
    def ask() -> None:
        mesh = pl.Mesh(tp=4)
        mesh.divide(tp_row=2, tp_column=2)
        with pytest.raises(InputError, match="at least one and each once"):
            mesh.axis(*names)

    pl.run_threads(4, ask, timeout_seconds=60)


def test_expert_lines_between_threads() -> None:
    """Collectives along ep and along the axes of an expert parameter; sums over replicas of both kinds at once."""

    def exchange() -> tuple[list[float], list[float], float, float]:
        mesh = pl.Mesh(dp=4, tp=2, ep=2)
        own = torch.tensor([float(mesh.rank)])
        dense, experts = own.clone(), own.clone()
        both = mesh.links("dp", "cp").all_reduce(dense), mesh.links("edp").all_reduce(experts)
        for work in (*both[1], *both[0]):  # in another order than they began
            work.wait()
        ep, joint = mesh.axis("ep").all_gather(own).tolist(), mesh.axis("ep", "tp").all_gather(own).tolist()
        return ep, joint, float(dense), float(experts)

    found = pl.run_threads(8, exchange, timeout_seconds=60)
    assert found[3] == ([1.0, 3.0], [0.0, 1.0, 2.0, 3.0], 1.0 + 3 + 5 + 7, 3.0 + 7)
    assert found[4] == ([4.0, 6.0], [4.0, 5.0, 6.0, 7.0], 0.0 + 2 + 4 + 6, 0.0 + 4)


def test_the_block_of_an_expert_parameter_lies_on_ep_and_tp() -> None:
    full = torch.arange(4 * 6 * 2, dtype=torch.float64).view(4, 6, 2)
    how = Placed((4, 6, 2), {0: even(4, 2, ("ep",)), 1: even(6, 2, ("tp",))})

    def cut_and_join() -> tuple[tuple[int, ...], bool]:
        mesh = pl.Mesh(dp=4, tp=2, ep=2)
        parameter = nn.Parameter(how.cut(full, mesh.expert_place))
        place_parameter(parameter, how, mesh.expert_place)
        joined = MeshBlocks(mesh, sharded=False).join(parameter, parameter.detach())
        return tuple(parameter.shape), torch.equal(joined, full)

    assert pl.run_threads(8, cut_and_join, timeout_seconds=60) == [((2, 3, 2), True)] * 8
