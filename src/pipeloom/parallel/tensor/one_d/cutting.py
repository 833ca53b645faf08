"""Cuts parameters into the blocks of processes, and says in one line what does not fit."""

import torch
from torch import nn

from pipeloom.common.division import divisors
from pipeloom.errors import InputError
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.placed import Cut, Place, Placed, Section, even, place_parameter, placed
from pipeloom.parallel.tensor.plan import Entry


class Cutter:
    """Replaces parameters by this process's blocks. A parameter under several names is cut once, and stays tied.

    Args:
        mesh: whose place the blocks are for.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.place = mesh.place
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter, Placed]] = {}

    def block_of(self, parameter: nn.Parameter, how: Placed, name: str, place: Place | None = None) -> nn.Parameter:
        """The block of a full parameter.

        Args:
            parameter: the full one.
            how: it lies.
            name: for errors.
            place: the block's; None: that of all layers but experts.

        Raises:
            InputError: the parameter is cut in another way under another name.
        """
        if id(parameter) in self._made:
            _, block, before = self._made[id(parameter)]
            if how != before:
                raise InputError(
                    f"parameter {name!r} is tied to one that the plan cuts in another way. Use the same kind for both, "
                    "such as 'vocabulary' for embedding and head."
                )
            return block
        if placed(parameter) is not None:
            raise InputError(f"parameter {name!r} is cut already. Call parallelize once per model.")
        place = place or self.place
        if how.cuts:
            with torch.no_grad():
                block = nn.Parameter(how.cut(parameter.detach(), place), parameter.requires_grad)
            vars(block).update(vars(parameter))
        else:
            block = parameter
        place_parameter(block, how, place)
        self._made[id(parameter)] = parameter, block, how  # the parameter too: its id stays its own
        return block

    def made(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The block that was made of a full parameter, if any."""
        found = self._made.get(id(parameter))
        return found[1] if found else None


def section_cut(name: str, size: int, entry: Entry, axes: tuple[str, ...], degree: int) -> Cut:
    """How a dimension of `size` elements is cut between `degree` processes.

    Raises:
        InputError: it cannot be cut evenly; the message has the degrees that fit.
    """
    if entry.halves:
        if size % (2 * degree):
            raise InputError(_uneven(name, size // 2, "outputs per half", degree))
        return Cut(axes, (Section(size // 2, degree),) * 2)
    if entry.sections is None:
        if size % degree:
            raise InputError(_uneven(name, size, "features", degree))
        return even(size, degree, axes)
    named = sum(rows for rows, _ in entry.sections)
    if named != size:
        raise InputError(
            f"plan for {name!r}: sections {entry.sections} have {named} elements, the layer {size}. Name all sections "
            "of the layer."
        )
    sections = []
    for index, (rows, heads) in enumerate(entry.sections):
        may_share = (index > 0 or entry.shares) and degree % heads == 0
        if rows % heads or (heads % degree and not may_share):
            raise InputError(_uneven(name, heads, "key heads" if index or entry.shares else "heads", degree))
        sections.append(Section(rows, min(heads, degree)))
    return Cut(axes, tuple(sections))


def sum_over_of(cut: Cut, degree: int) -> tuple[str, ...]:
    """The axes along which processes share elements of a cut: they have parts of the gradient."""
    return cut.axes if any(section.blocks < degree for section in cut.sections) else ()


def _uneven(name: str, number: int, what: str, degree: int) -> str:
    near = sorted(divisors(number), key=lambda d: (abs(d - degree), d))[:2]
    return (
        f"{name!r} has {number} {what}, which {degree} tensor-parallel ranks cannot share evenly. Use tp="
        f"{' or tp='.join(map(str, sorted(near)))}."
    )
