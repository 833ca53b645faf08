"""The model of `pipeloom plan --profile`: measured layers of any model, from a file."""

from collections.abc import Mapping
from typing import Any

from pipeloom.cli.common.planning import check_file_alone
from pipeloom.cli.planned.model import Planned
from pipeloom.common.json_reader import parse_file
from pipeloom.common.quantities import counted
from pipeloom.errors import InputError
from pipeloom.parallel import Precision
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.profiled_costs import ProfiledCosts, check_whole
from pipeloom.plan.search.answer import why_not

_OPTION = "--profile"


def planned_profile(given: Mapping[str, Any], cluster: Cluster, fixed: Mapping[str, Any]) -> Planned:
    """The layers of the file, whose times are those of the devices of the cluster.

    Args:
        given: the options; those that are not given are None.
        cluster: links, and memory of its devices.
        fixed: values of ``--fix``.

    Raises:
        InputError: a file that cannot be read, options that need the sizes of a model, or an unknown micro-batch size.
    """
    from pipeloom.plan.partition.graph_text import parse_profile_file
    from pipeloom.plan.profile_units import has_kept_bytes, units_of

    check_file_alone(given, _OPTION, ("vocabulary_size", "precision"), "the layers")
    check_whole(fixed, f"--fix={given['fix']}")
    path = given["profile"]
    profile = parse_file(_OPTION, path, parse_profile_file)
    if not any(layer.forward_seconds + layer.backward_seconds for layer in profile.layers):
        raise InputError(f"{_OPTION} {path}: no layer takes time. Profile the model again.")
    samples = profile.samples or fixed.get("microbatch_size")
    if samples is None:
        raise InputError(
            f'{_OPTION} {path}: the number of samples of its minibatch is unknown. Add "samples" to the file, or '
            "--fix microbatch_size=N."
        )
    size = given["batch"]["size"]
    if size % samples:
        raise InputError(
            f"--batch.size={size}: must be a multiple of the {counted(samples, 'sample')} of a micro-batch, of which "
            f"{path} has the times. Change it."
        )
    forbidden = {"slices", "context"}
    if not has_kept_bytes(profile):
        if fixed.get("recompute", ("none",)) != ("none",):
            raise InputError(
                f"--fix={given['fix']}: recompute needs `kept_bytes` of every layer, which {path} has not. Remove it."
            )
        forbidden.add("recompute")
    fixed = {"precision": "fp32", **fixed}
    element = 2 if Precision(fixed["precision"]).has_masters else 4
    costs = ProfiledCosts(units=units_of(profile, samples, element), cluster=cluster, name=path, samples=samples)
    return Planned(
        costs=costs,
        options=None,
        forbidden=frozenset(forbidden),
        ends_alone=False,
        fixed=fixed,
        can_run=lambda _: None,
        accept=lambda found: why_not(costs, found),
    )
