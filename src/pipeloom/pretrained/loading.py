"""`from_pretrained`: the model of a Hugging Face directory without its values, and where these are read later."""

import copy
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.common.tensor_file import StoredTensor
from pipeloom.devices.existing import existing_device
from pipeloom.errors import InputError, folded, listed, one_line
from pipeloom.pretrained.conversions import Conversions, find_conversions
from pipeloom.pretrained.files import CONFIG_NAME, TORCH_TYPES, find_tensors, mapped
from pipeloom.pretrained.initial_values import mark_initialized, one_at_a_time
from pipeloom.pretrained.weights import NAME, WEIGHTS, PretrainedWeights


def from_pretrained(
    directory: str | os.PathLike[str],
    model_class: Any = None,
    dtype: torch.dtype | str | None = None,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    download: bool = False,
    **config_changes: Any,
) -> Any:
    """The model of a Hugging Face directory, on the meta device; a `Pipeline` reads the values that it needs.

    ``pipeloom.Pipeline(model, schedule)`` reads in each process the tensors of its own stages, one after another,
    straight to their place; of parameters that `pipeloom.parallelize` cut, this process's blocks. Shapes and names are
    compared with the files before. Every process calls this function alike.

    Args:
        directory: with config.json and model.safetensors, or several safetensors files and their index.
        model_class: a class of transformers, such as AutoModelForSequenceClassification. None: the one that config.json
            names in `architectures`.
        dtype: of the parameters, such as torch.bfloat16 or "bfloat16". None: that of config.json, else of the files.
        device: for the values; None: the default device.
        seed: of parameters that are in no file, such as those of a new head. They are initialized as the model
            initializes them, alike in all processes.
        download: whether `directory` may be the name of a repository, which is then downloaded with huggingface_hub.
        config_changes: changes of the configuration, such as ``num_labels=3`` or ``attn_implementation="eager"``.

    Returns:
        The model in evaluation mode, as transformers returns it. `load_weights` gives it all values in this process.

    Raises:
        InputError: no such directory, device, class or option, quantized weights, or files that only unpickling reads.
        CheckpointError: files are missing or damaged, or do not fit the model.
    """
    where = torch.get_default_device() if device is None else existing_device(device, "device")
    home = _directory(directory, download=download)
    with one_at_a_time:
        model = _model(home, str(directory), model_class, dtype, where, seed, config_changes)
        _read_generation_config(model, home)
    return model.eval()


def _model(
    home: Path, name: str, model_class: Any, dtype: Any, where: torch.device, seed: int, config_changes: dict[str, Any]
) -> Any:
    model, conversions, stored = describe(home, model_class, dtype, config_changes)
    model.config.name_or_path = model.name_or_path = name
    source = copy.deepcopy(model)
    mark_initialized(source)
    _tie(model, conversions, stored)
    _tell(model, home, conversions)
    _name_tensors(model, conversions)
    setattr(model, WEIGHTS, PretrainedWeights(source, stored, conversions, where, seed))
    return model


def load_weights(model: nn.Module) -> nn.Module:
    """Give a model of `from_pretrained` all of its values in this process.

    Raises:
        InputError: the model is another one. CheckpointError: a file cannot be read.
    """
    weights = getattr(model, WEIGHTS, None)
    if weights is None:
        raise InputError(f"model is a {type(model).__name__} without weights to load. Pass one of from_pretrained.")
    weights.load([model])
    return model


class Described(NamedTuple):
    """A directory's model on the meta device without ties, what makes its tensors, and the tensors of the files."""

    model: Any
    conversions: Conversions
    stored: dict[str, StoredTensor]


def describe(
    home: Path, model_class: Any = None, dtype: Any = None, config_changes: Mapping[str, Any] | None = None
) -> Described:
    """Read the configuration and the headers of a directory; for arguments and errors see `from_pretrained`."""
    with one_at_a_time:
        config, model_class = _config(home, model_class, config_changes or {})
        stored = find_tensors(home, getattr(config, "transformers_weights", None))
        model = _without_values(model_class, config, _dtype(dtype, config, stored))
        conversions = find_conversions(model, stored)
    model._weight_conversions = conversions.used
    return Described(model, conversions, stored)


def empty_model(home: Path) -> Any:
    """The model of a directory's config.json on the meta device, without weights to load.

    Raises:
        InputError: the configuration makes no model.
    """
    if not (home / CONFIG_NAME).is_file():
        raise InputError(f"{home} has no {CONFIG_NAME}. Pass the one of the model.")
    with one_at_a_time:
        config, model_class = _config(home, None, {})
        model = _without_values(model_class, config, _dtype(None, config, {}))
        model.tie_weights(recompute_mapping=False)
        _read_generation_config(model, home)
    return model


def _directory(directory: Any, *, download: bool) -> Path:
    if not isinstance(directory, str | os.PathLike):
        raise InputError(
            f"directory is {folded(directory)}. Pass the path of one with {CONFIG_NAME} and safetensors files."
        )
    home = Path(directory)
    if not home.is_dir() and download:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(directory), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    if not home.is_dir():
        raise InputError(
            f"{home} is not a directory. Pass one with {CONFIG_NAME} and safetensors files, or download=True for the "
            "name of a repository."
        )
    if (home / "manifest.json").is_file():
        raise InputError(f"{home} is a checkpoint of pipeloom. Convert it with `pipeloom checkpoint convert --config`.")
    if not (home / CONFIG_NAME).is_file():
        raise InputError(f"{home} has no {CONFIG_NAME}. Copy the one of the model.")
    return home


def _config(home: Path, model_class: Any, changes: Mapping[str, Any]) -> tuple[Any, Any]:
    """The configuration with its changes, and the class of the model."""
    try:
        import transformers
        from transformers.models.auto.auto_factory import _get_model_class
    except ImportError as error:
        raise InputError("transformers is not installed. Run pip install 'pipeloom[huggingface]'.") from error
    kind = getattr(model_class, "config_class", None) or transformers.AutoConfig
    try:
        config, unknown = kind.from_pretrained(home, local_files_only=True, return_unused_kwargs=True, **changes)
    except Exception as error:  # of any type, from files and options
        raise InputError(f"{home / CONFIG_NAME} makes no configuration ({one_line(error)}). Change it.") from error
    if unknown:
        raise InputError(f"{folded(next(iter(unknown)))} is no option of {type(config).__name__}. Remove it.")
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"{home} has quantized weights, which cannot be trained. Use weights that are not quantized.")
    if model_class is None:
        names = getattr(config, "architectures", None)
        if not names:
            raise InputError(
                f"{home / CONFIG_NAME} names no model (architectures). Pass model_class, such as "
                "transformers.AutoModelForCausalLM."
            )
        model_class = getattr(transformers, str(names[0]), None)
        if model_class is None:
            raise InputError(
                f"{home / CONFIG_NAME} has architectures={names}, which transformers {transformers.__version__} does "
                "not have. Pass model_class, such as transformers.AutoModelForCausalLM."
            )
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is not None:
        if type(config) not in mapping:
            raise InputError(f"{model_class.__name__} has no model for {type(config).__name__}. Pass another class.")
        model_class = _get_model_class(config, mapping)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise InputError(f"model_class={folded(model_class)}: must be a class of transformers' models.")
    return config, model_class


def _dtype(given: Any, config: Any, stored: dict[str, StoredTensor]) -> torch.dtype:
    """The dtype of parameters: as given, of the configuration, or of the first floating-point tensor."""
    wanted = given if given is not None else getattr(config, "dtype", None)
    if isinstance(wanted, str) and wanted != "auto":
        wanted = getattr(torch, wanted.removeprefix("torch."), wanted)
    if wanted is None or wanted == "auto":
        found = (TORCH_TYPES[each.dtype] for each in stored.values())
        wanted = next((dtype for dtype in found if dtype.is_floating_point), torch.get_default_dtype())
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise InputError(f"dtype={folded(given)}: must be a floating-point type, such as torch.bfloat16.")
    return wanted


def _without_values(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model on the meta device, without ties, as transformers builds it before loading."""
    config.dtype = dtype
    for key in config.sub_configs:
        if (inner := getattr(config, key)) is not None:
            inner.dtype = dtype
    with ExitStack() as stack:
        for context in model_class.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
        model = model_class(config)
    kept = {pattern.replace("*", ".*"): kind for pattern, kind in model._get_dtype_plan(dtype).items()}
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in made:
                name = f"{path}.{key}" if path else key
                kind = next((kind for pattern, kind in kept.items() if re.search(pattern, name)), parameter.dtype)
                empty = torch.empty_like(parameter, device="meta", dtype=kind)
                made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            if parameter is not None:
                module._parameters[key] = made[id(parameter)]
    return model


def _tie(model: Any, conversions: Conversions, stored: dict[str, StoredTensor]) -> None:
    """Tie what the configuration ties. A tensor that is in the files twice, with different values, stays untied."""
    missing = set(conversions.missing)
    for target, source in list(model.all_tied_weights_keys.items()):
        if {target, source}.isdisjoint(missing) and _are_equal(target, source, conversions, model, stored):
            missing.add(target)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    conversions.missing = missing & conversions.missing


def _are_equal(one: str, other: str, conversions: Conversions, model: Any, stored: dict[str, StoredTensor]) -> bool:
    def value(name: str) -> Tensor:
        return conversions.of[name].make(lambda key: mapped(stored[key]), model)[name]

    first, second = value(one), value(other)
    equal = torch.equal(first, second)
    if not equal:
        _warn(f"{one} and {other} have different values in the files: they are not tied, though config.json says so.")
    return equal


def _name_tensors(model: nn.Module, conversions: Conversions) -> None:
    """Give each tensor its name in the model: of a tied one, the name that has values."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in reversed(named):
        setattr(tensor, NAME, name)
    for name, tensor in named:
        if name in conversions.of:
            setattr(tensor, NAME, name)


def _tell(model: Any, home: Path, conversions: Conversions) -> None:
    """Warn of tensors that are missing or not used, except those that transformers expects to be.

    Raises:
        InputError: all are missing: the directory has another model.
    """
    if conversions.unexpected and not conversions.of:
        raise InputError(
            f"{home} has no values for {type(model).__name__}, but {_some(set(conversions.unexpected))}. Pass the "
            "model_class of these weights."
        )
    found = SimpleNamespace(missing_keys=set(conversions.missing), unexpected_keys=set(conversions.unexpected))
    model._adjust_missing_and_unexpected_keys(found)
    if found.missing_keys:
        _warn(f"{home} has no values for {_some(found.missing_keys)} of {type(model).__name__}: they are initialized.")
    if found.unexpected_keys:
        _warn(f"{home} has {_some(found.unexpected_keys)}, which {type(model).__name__} does not have: left out.")


def _some(names: set[str]) -> str:
    return listed(sorted(names), most=4)


def _warn(message: str) -> None:
    """Warn in the first process alone: all have the same files."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, stacklevel=4)


def _read_generation_config(model: Any, home: Path) -> None:
    if model.can_generate() and (home / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(home, local_files_only=True)
