"""Grids and lines of processes on a mesh: what is refused before anything communicates."""

import pytest

import pipeloom as pl
from pipeloom.errors import InputError


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
