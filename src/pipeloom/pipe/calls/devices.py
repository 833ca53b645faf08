"""Moves values between devices, each copy in a CUDA stream of its own.

Computations run in the current stream of their device, in each thread. A value that goes to another thread or device
carries a mark of the moment when it is complete; the receiver's stream waits for that moment, the host does not. Other
devices than CUDA need no marks: their operations end before the call returns, or torch orders them.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

Mark = torch.cuda.Event | None


def mark(device: torch.device) -> Mark:
    """The present end of the current stream of `device`; None where there are no streams."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class Receiver:
    """Brings values to one device.

    Args:
        device: where the values are needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copy_streams: dict[torch.device, torch.cuda.Stream] = {}

    def computing(self) -> AbstractContextManager[object]:
        """Makes the device the current one of this thread."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def receive(self, tensor: Tensor, ready: Mark) -> Tensor:
        """`tensor` on this device, complete for what the current stream does from now on."""
        source = tensor.device
        if source == self.device:
            if ready is not None:
                stream = torch.cuda.current_stream(source)
                stream.wait_event(ready)
                tensor.record_stream(stream)
            return tensor
        if "cuda" not in (source.type, self.device.type):
            return tensor.to(self.device)
        with ExitStack() as stack:
            for device in (source, self.device):
                if device.type == "cuda":
                    stack.enter_context(torch.cuda.stream(self._copy_stream(device)))
            if source.type == "cuda":
                if ready is not None:
                    torch.cuda.current_stream(source).wait_event(ready)
                tensor.record_stream(torch.cuda.current_stream(source))
            moved = tensor.to(self.device, non_blocking=source.type == self.device.type)
            copied = mark(self.device)
        if copied is not None:
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(copied)
            moved.record_stream(compute)
        return moved

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._copy_streams:
            self._copy_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._copy_streams[device]
