"""`parallelize`: cuts the layers of a model between the tensor- and expert-parallel ranks of a mesh, by a plan."""

from collections.abc import Mapping
from typing import Any, cast, get_args

from torch import nn

from pipeloom.errors import InputError
from pipeloom.models.experts.transformers_experts import fused_experts, make_dispatching
from pipeloom.parallel.expert.cutting import expert_layers, is_experts
from pipeloom.parallel.expert.traffic import Exchange
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.placed import placed
from pipeloom.parallel.tensor.decoders import (
    adapted,
    install,
    is_decoder,
    own_patterns,
    plan_of,
    with_own_sections,
)
from pipeloom.parallel.tensor.equal_models import EqualModels
from pipeloom.parallel.tensor.grids.layout import OnGrid
from pipeloom.parallel.tensor.grids.shape import GridLayout, GridShape
from pipeloom.parallel.tensor.one_d.layers import OneD
from pipeloom.parallel.tensor.plan import Entry, entries_of
from pipeloom.parallel.tensor.unchanged import unchanged_on_error

LAYOUTS = ("1d", *get_args(GridLayout))


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    plan: Mapping[str, Any] | None = None,
    *,
    sequence: bool = False,
    layout: str = "1d",
    depth: int | None = None,
    exchange: Exchange = "counts",
) -> nn.Module:
    """Cut the layers of a model, in place, between the processes along axis tp. Every process calls it.

    Layers of experts, such as `pipeloom.models.experts.Experts`, are also cut along ep: of E experts each process has
    E / ep, tokens are sent to the processes of their experts, and results come back (arXiv:2006.16668). Replicas then
    call `Pipeline.step`, `forward` and `evaluate` together, since each computes for the others.

    Parameters become this process's blocks under their own names; `pipeloom.parallel.placed` has how each lies. Models
    with values, equal on all processes, and models on the meta device are cut alike. Call it before the model is given
    to `pipeloom.Pipeline` or `pipeloom.split.split`, and before an optimizer is made.

    With the kind "vocabulary" for the last layer the model returns `VocabularyLogits`: use ``F.cross_entropy``, the
    losses of `pipeloom.models` or `pipeloom.parallel_cross_entropy`. With "column_gather" it returns all logits, for
    any loss.

    Dropout masks are those of one process in runs with slices (``slices=[tokens]`` for one slice). In other runs, seed
    all tensor-parallel ranks with the same ``torch.manual_seed``; masks of attention weights then repeat between ranks.

    Args:
        model: any module, such as `pipeloom.models.GPT` or a decoder of transformers.
        mesh: with axis tp, ep or both. Degrees of 1 leave the model as it is.
        plan: module names with ``*`` -> kinds, see `pipeloom.parallel.tensor.plan`. None: the model's own.
        sequence: Megatron's sequence parallelism: layers between cut ones have S / t of the tokens, with the
            communication of the plain form and less memory. The model's input is [batch, tokens].
        layout: "1d" (arXiv:1909.08053), "2d" (q * q processes, arXiv:2104.05343), "2.5d" (depth * q * q,
            arXiv:2105.14500) or "3d" (l * l * l, arXiv:2105.14450). With the last three, processes share weights and
            activations along several dimensions, also the samples of a micro-batch: the inputs of the model are whole
            micro-batches on all of them, its activations and logits are blocks. They know linear layers, norms and
            token embeddings, such as those of `pipeloom.models.GPT`.
        depth: of layout "2.5d", from 1 to q.
        exchange: how tokens are sent along ep: "counts" sends their numbers first, then no more than the tokens;
            "capacity" sends the capacity of every expert, filled with 0, and no numbers. The results are equal.

    Returns:
        The model itself.

    Raises:
        InputError: an unknown kind or layout, a pattern without a module, sizes that cannot be shared evenly, a module
            that cannot be cut that way, a model that is cut already, ep above 1 without experts, or other weights
            than on another rank of tp or ep. The model is then as it was.
    """
    decoder = _check_arguments(model, mesh, layout, sequence, exchange)
    entries = _entries(model, mesh, plan)
    shape = _grid_shape(mesh.degree("tp"), layout, depth, sequence=sequence)
    if mesh.degree("tp") == mesh.degree("ep") == 1:
        return model
    if any(placed(parameter) is not None for parameter in model.parameters()):
        raise InputError("the model is cut already. Call parallelize once per model.")
    _check_experts(entries, mesh, layout)
    weights = EqualModels(model)
    with unchanged_on_error(model):
        for name in set(fused_experts(model)) & entries.keys():
            make_dispatching(model.get_submodule(name))
        if layout == "1d":
            cut = decoder and mesh.degree("tp") > 1
            found = adapted(model, entries, sequence=sequence) if cut else entries
            OneD(mesh, sequence=sequence, exchange=exchange).apply(model, found)
            if cut:
                install(model, found, mesh, sequence=sequence)
        else:
            OnGrid(mesh, shape).apply(model, entries)
        weights.check(mesh)
    return model


def _entries(model: nn.Module, mesh: Mesh, plan: Mapping[str, Any] | None) -> dict[str, Entry]:
    """How modules are cut. Along ep all experts are cut, whether the plan names them or not."""
    fused = set(fused_experts(model))
    layers = [*expert_layers(model), *(name for name in fused if not is_experts(model.get_submodule(name)))]
    experts = dict.fromkeys(layers, Entry("experts")) if mesh.degree("ep") > 1 else {}
    if mesh.degree("tp") == 1 and plan is None:
        return experts
    is_own = plan is None
    if plan is None:
        plan = plan_of(model)
    found = with_own_sections(model, entries_of(model, plan, optional=own_patterns(model)))
    if is_own and not found:
        raise InputError(
            f"mesh has tp={mesh.degree('tp')}: the model's own plan names no module of {type(model).__name__}; "
            "adapters, for example, rename modules. Pass plan= for its modules, or use tp=1."
        )
    for name, entry in list(found.items()):
        if entry.kind in ("sum", "experts") and name in fused:  # its parameters are cut as it says itself
            found[name] = Entry("experts")
            for inside in [other for other in found if other.startswith(f"{name}.")]:
                del found[inside]
    found = {**experts, **found}
    if mesh.degree("tp") > 1:
        return found
    return {name: entry for name, entry in found.items() if entry.kind == "experts"}


def _check_experts(entries: Mapping[str, Entry], mesh: Mesh, layout: str) -> None:
    """Raises InputError where there are no experts to share, or a layout cannot share them."""
    name = next((name for name, entry in entries.items() if entry.kind == "experts"), None)
    if mesh.degree("ep") > 1 and name is None:
        raise InputError(
            f"mesh={mesh}: the model has no experts. Use ep=1, or a model with pipeloom.models.experts.Experts."
        )
    if name is not None and layout != "1d":
        raise InputError(f"layout={layout!r} with experts ({name!r}): layout '1d' alone can cut them. Use layout='1d'.")


def _check_arguments(model: Any, mesh: Any, layout: Any, sequence: Any, exchange: Any) -> bool:
    """Whether the model is a decoder of transformers. Raises InputError for unknown arguments."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: must be an nn.Module. Cut the model before it is split.")
    if not isinstance(mesh, Mesh):
        raise InputError(f"mesh={mesh!r}: must be a pipeloom.Mesh, such as Mesh(tp=2).")
    if layout not in LAYOUTS:
        raise InputError(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}.")
    if not isinstance(sequence, bool):
        raise InputError(f"sequence={sequence!r}: must be True or False.")
    if exchange not in get_args(Exchange):
        raise InputError(f"exchange={exchange!r}: must be one of {', '.join(get_args(Exchange))}.")
    decoder = is_decoder(model)
    if layout != "1d" and decoder:
        raise InputError(
            f"{type(model).__name__} with layout={layout!r}: decoders of transformers can be cut with layout '1d' "
            "alone. Use layout='1d'."
        )
    if layout == "1d" and "tp" not in mesh.place.degrees:
        raise InputError(
            f"mesh {mesh} is divided into {' x '.join(mesh.place.degrees)} for another model: layout '1d' needs axis "
            "tp in one. Make another Mesh."
        )
    return decoder


def _grid_shape(degree: int, layout: str, depth: int | None, *, sequence: bool) -> GridShape:
    """The grid of a layout; of 1d, of one process."""
    if layout == "1d":
        if depth is not None:
            raise InputError(f"depth={depth} has no effect with layout 1d. Remove it, or use layout='2.5d'.")
        return GridShape("2d", 1)
    if sequence:
        raise InputError(
            f"sequence=True with layout {layout}: processes share samples and width between all layers already. Use "
            "sequence=False, or layout='1d'."
        )
    return GridShape.of(degree, cast(GridLayout, layout), depth)
