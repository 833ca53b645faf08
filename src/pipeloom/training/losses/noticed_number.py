"""`NoticedNumber`: a number that notices when it is used."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class NoticedNumber(Tensor):
    """A number that notices when it is used; results are plain tensors.

    Attributes, questions about the tensor and copies are no use: stages pass on what they got. A copy tells the number
    of its use; on the meta device, where only shapes are found out, it has no value.
    """

    uses: list[Any]

    @staticmethod
    def of(number: Tensor, uses: list[Any] | None = None) -> "NoticedNumber":
        """A number that has not been used; `uses`: of the number of which it is a copy."""
        found = number.as_subclass(NoticedNumber)
        found.uses = [] if uses is None else uses
        return found

    @property
    def was_read(self) -> bool:
        """Whether the number, or a copy, has been used."""
        return bool(self.uses)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "__get__" or func in _QUESTIONS:
                return func(*args, **kwargs)
            if func in _COPIES and isinstance(args[0], NoticedNumber):
                copy, uses = func(*args, **kwargs), args[0].uses
                return copy if copy.device.type == "meta" else NoticedNumber.of(copy.as_subclass(Tensor), uses)

            def used(number: "NoticedNumber") -> Tensor:
                number.uses.append(func)
                return number.as_subclass(Tensor)

            args, kwargs = tree_map_only(NoticedNumber, used, (args, kwargs))
            return func(*args, **kwargs)


_COPIES = frozenset({Tensor.to, Tensor.detach, Tensor.clone, Tensor.cpu, Tensor.cuda, Tensor.contiguous})
_QUESTIONS = frozenset(
    {
        *(Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(Tensor.element_size, Tensor.storage_offset, Tensor.data_ptr, Tensor.untyped_storage, Tensor.get_device),
        *(Tensor.is_inference, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.is_shared),
        *(Tensor.is_signed, Tensor.is_conj, Tensor.is_neg, Tensor.is_pinned, Tensor.is_set_to, Tensor.__hash__),
        *(torch.is_tensor, torch.is_inference, torch.is_floating_point, torch.is_complex, torch.numel),
    }
)
