"""`parallelize`: cuts the layers of a model between the tensor-parallel ranks of a mesh, by a plan."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from pipeloom.errors import InputError
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.placed import placed
from pipeloom.parallel.tensor.decoders import adapted, plan_of
from pipeloom.parallel.tensor.layout import Layout
from pipeloom.parallel.tensor.one_d.layers import OneD
from pipeloom.parallel.tensor.plan import entries_of

LAYOUTS = ("1d",)


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    plan: Mapping[str, Any] | None = None,
    *,
    sequence: bool = False,
    layout: str = "1d",
) -> nn.Module:
    """Cut the layers of a model, in place, between the processes along axis tp. Every process calls it.

    Parameters become this process's blocks under their own names; `pipeloom.parallel.placed` has how each lies. Models
    with values, equal on all processes, and models on the meta device are cut alike. Call it before the model is given
    to `pipeloom.Pipeline` or `pipeloom.split.split`, and before an optimizer is made.

    With the kind "vocabulary" for the last layer the model returns `VocabularyLogits`: use ``F.cross_entropy``, the
    losses of `pipeloom.models` or `pipeloom.parallel_cross_entropy`. With "column_gather" it returns all logits, for
    any loss.

    Dropout masks are those of one process in runs with slices (``slices=[tokens]`` for one slice). In other runs, seed
    all tensor-parallel ranks with the same ``torch.manual_seed``.

    Args:
        model: any module, such as `pipeloom.models.GPT` or a decoder of transformers.
        mesh: with axis tp. A degree of 1 leaves the model as it is.
        plan: module names with ``*`` -> kinds, see `pipeloom.parallel.tensor.plan`. None: the model's own.
        sequence: Megatron's sequence parallelism: layers between cut ones have S / t of the tokens, with the
            communication of the plain form and less memory. The model's input is [batch, tokens].
        layout: "1d" (arXiv:1909.08053).

    Returns:
        The model itself.

    Raises:
        InputError: an unknown kind or layout, a pattern without a module, sizes that cannot be shared evenly, a module
            that cannot be cut that way, or a model that is cut already.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: must be an nn.Module. Cut the model before it is split.")
    if not isinstance(mesh, Mesh):
        raise InputError(f"mesh={mesh!r}: must be a pipeloom.Mesh, such as Mesh(tp=2).")
    if layout not in LAYOUTS:
        raise InputError(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}.")
    if plan is None:
        plan = plan_of(model)
    entries = entries_of(model, plan)
    if mesh.degree("tp") == 1:
        return model
    if any(placed(parameter) is not None for parameter in model.parameters()):
        raise InputError("the model is cut already. Call parallelize once per model.")
    form: Layout = OneD(mesh, sequence=sequence)
    form.apply(model, adapted(model, entries, mesh, sequence=sequence))
    return model
