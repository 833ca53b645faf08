"""What PipelineTrainer makes of TrainingArguments: unsupported options, and the view of accelerate.

Trainer counts every process as a data-parallel replica. Pipeline ranks are none, so accelerate and TrainingArguments
see one process with one device per replica, and PipelineTrainer alone knows the others. Ranks keep their numbers:
Trainer's process 0 is process 0.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import DistributedType

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.processes import Processes

# Option -> what to do instead. An option counts as used if it is neither False, None, empty nor 0.
_UNSUPPORTED = {
    "deepspeed": "Remove it; data='zero1' to 'zero3' shards optimizer states, gradients and parameters",
    "fsdp": "Remove it; data='zero3' shards parameters",
    "torch_compile": "Remove it",
    "fp16": "Use bf16=True, or precision='bf16'",
    "fp16_full_eval": "Remove it",
    "bf16_full_eval": "Remove it",
    "auto_find_batch_size": "Remove it, and choose num_microbatches",
    "use_liger_kernel": "Remove it",
    "parallelism_config": "Remove it, and pass mesh=",
    "enable_jit_checkpoint": "Use save_strategy='steps'",
    "debug": "Remove it",
}
_OPTIMIZERS = ("galore", "apollo", "lomo", "layerwise")  # in names of optimizers that need the whole model


def check_arguments(args: Any) -> None:
    """Raises InputError for an option of TrainingArguments that a pipeline does not support."""
    for name, fix in _UNSUPPORTED.items():
        value = getattr(args, name, None)
        if value:
            raise InputError(f"{name}={value!r}: PipelineTrainer does not support it. {fix}.")
    if args.load_best_model_at_end and args.save_only_model:
        raise InputError(
            "save_only_model=True with load_best_model_at_end=True: the best model is loaded from training states. "
            "Remove save_only_model."
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(word in optimizer for word in _OPTIMIZERS):
        raise InputError(f"optim={optimizer!r}: needs the whole model in one process. Use optim='adamw_torch'.")


def act_as_one_process(args: Any, processes: Processes, num_replicas: int) -> None:
    """Make accelerate and `args` see one process, with a device per replica."""
    state = args.distributed_state
    if processes.size > 1 and state.num_processes == 1:  # also where accelerate did not notice the process group
        state.local_process_index = int(os.environ.get("LOCAL_RANK", processes.rank))
    state.distributed_type, state.num_processes, state.process_index = DistributedType.NO, 1, processes.rank
    args._n_gpu = num_replicas


@contextmanager
def as_many_processes(args: Any, size: int) -> Iterator[None]:
    """Inside, `args.world_size` is the number of processes."""
    state = args.distributed_state
    state.num_processes = size
    try:
        yield
    finally:
        state.num_processes = 1


@contextmanager
def as_one_device(args: Any) -> Iterator[None]:
    """Inside, `args.n_gpu` is 1: a loss is that of the whole batch."""
    number, args._n_gpu = args._n_gpu, 1
    try:
        yield
    finally:
        args._n_gpu = number
