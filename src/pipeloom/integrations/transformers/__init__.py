"""`PipelineTrainer`: transformers' Trainer on a pipeline.

arguments        options of Trainer that a pipeline does not support; one process in the eyes of accelerate
processes        values from one process on all
micro_batches    the batches of an update, cut into micro-batches
stage_forward    Trainer's loss inside the stages, around the model's own forward
predictions      losses and predictions of a batch, from the outputs of the last stage
optimizers       optimizers over the parameters of one process
pipelined_model  what Trainer holds in place of the model and of data loaders
schedules        the schedule of an update
checkpoints      training state in the checkpoint directories of Trainer
trainer          the class

Importing this package imports nothing of transformers; using its name does.
"""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.integrations.transformers.trainer import PipelineTrainer

_LAZY = {"pipeloom.integrations.transformers.trainer": "PipelineTrainer"}

__all__ = ["PipelineTrainer"]

__getattr__ = lazy_exports(__name__, _LAZY)
