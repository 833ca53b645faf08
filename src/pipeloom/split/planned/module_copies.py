"""Copies of module objects: with the same tensors, without memory, or with zeros of almost none."""

from collections import OrderedDict

import torch
from torch import nn

from pipeloom.split.planned.attributes import bound_to
from pipeloom.split.planned.collected import collecting_hooks

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def without_memory(module: nn.Module, *, collects: bool = False) -> nn.Module:
    """A module of the same class with the same attributes, whose parameters and buffers are on the meta device.

    Forward hooks stay behind, except those that collect outputs in a model that returns what it collects (`collects`).
    """
    collects = collects or bool(getattr(module, "_can_record_outputs", None))
    twin = shallow_copy(module)
    for kind in ("_parameters", "_buffers"):
        tensors = vars(module)[kind].items()
        vars(twin)[kind] = {
            name: None if t is None else t.detach().to("meta").requires_grad_(t.requires_grad) for name, t in tensors
        }
    for hooks in HOOKS:
        vars(twin)[hooks] = OrderedDict()
    if collects:
        twin._forward_hooks.update(enumerate(collecting_hooks(module)))
    twin._modules = {
        name: None if part is None else without_memory(part, collects=collects)
        for name, part in module._modules.items()
    }
    return twin


def with_zeros(twin: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module without memory that computes with zeros, each tensor over the memory of one number."""
    copy = shallow_copy(twin)
    for kind in ("_parameters", "_buffers"):
        tensors = vars(twin)[kind].items()
        vars(copy)[kind] = {
            name: None if t is None else torch.zeros((), dtype=t.dtype, device=device).expand(t.shape)
            for name, t in tensors
        }
    copy._modules = {name: None if part is None else with_zeros(part, device) for name, part in twin._modules.items()}
    return copy


def shallow_copy(module: nn.Module) -> nn.Module:
    """Another module object with the same attributes, also the same parameters and submodules, in a dict of its own.

    Methods of the module that are set on the instance, such as a replaced forward, are bound to the copy.
    """
    copy: nn.Module = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(copy)[name] = bound_to(copy, value, module)
    copy._modules = dict(module._modules)
    return copy
