"""On which devices the processes of a run compute, and which transports connect them."""

from collections.abc import Sequence

import torch

from pipeloom.devices import sharing_of
from pipeloom.devices.sharing import MemorySharing
from pipeloom.errors import InputError, RunError, listed
from pipeloom.processes.agreement import gather_json
from pipeloom.processes.collectives import first_line
from pipeloom.processes.members import Members
from pipeloom.transport.shared_memory import host_identity

_LOST = "another process ended before all processes knew each other's devices"


def check_devices(
    name: str, device: torch.device, replicas: Sequence[Sequence[int]], members: Members
) -> MemorySharing | None:
    """Compare the devices of all processes; returns what shares memory of theirs, None on CPUs or where nothing can.

    Args:
        name: of the transport.
        device: of this process.
        replicas: the processes of each replica of the pipeline, by rank.
        members: all processes.

    Raises:
        InputError: only some processes compute on a CUDA device, the transport is for devices of another kind, or NCCL
            would connect ranks that share a GPU.
    """
    identity, problem, sharing = "", "", None
    if device.type == "cuda":
        sharing = sharing_of(device)
        identity = sharing.identity
        try:
            sharing.check()
        except (RunError, RuntimeError) as error:  # RuntimeError: of torch
            problem = first_line(error)
    answers = gather_json([host_identity(), identity, problem], members, lost=_LOST)
    places = [tuple(answer) for answer in answers]
    on_cuda = [process for process, (_, other, _) in enumerate(places) if other]
    if on_cuda and len(on_cuda) < len(places):
        others = [process for process in range(len(places)) if process not in on_cuda]
        raise InputError(
            f"processes {listed(on_cuda)} hold their stages on a CUDA device and processes {listed(others)} on the "
            "CPU: they must be on devices of one kind. Move the model with model.to(device) on every process."
        )
    if name == "cuda-ipc" and not on_cuda:
        raise InputError(
            f"transport='cuda-ipc' connects processes that compute on CUDA devices, and the model is on {device}. Move "
            "it with model.to('cuda'), or use transport='auto'."
        )
    if name == "shared-memory" and on_cuda:
        raise InputError(
            f"transport='shared-memory' carries tensors on the CPU, and the model is on {device}. Use "
            "transport='cuda-ipc'."
        )
    problems = [problem for _, _, problem in places if problem]
    if problems and name == "cuda-ipc":
        raise InputError(f"transport='cuda-ipc': {problems[0]}")
    for replica in replicas if on_cuda and (name == "torch" or problems) else ():
        gpus = [places[process][:2] for process in replica]
        together = [rank for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
        if together:
            fix = f"Start one process per GPU: {problems[0]}" if problems else "Use transport='cuda-ipc'."
            raise InputError(
                f"transport={name!r}: ranks {listed(together)} share a GPU, and NCCL needs a GPU per process. {fix}"
            )
    return None if problems else sharing
