"""Manifests of `pipeloom launch kubeflow` in the models of Kubeflow's own API.

Needs kubeflow-trainer-api 2.2 or later: the extra `schedulers`.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from pipeloom.job_files import Job, job_file


@pytest.mark.parametrize("more", [{"gpus_per_node": 8, "volume": "runs"}, {"processes_per_node": 2}])
def test_kubeflow_reads_all_fields_of_a_trainjob(more: dict[str, Any]) -> None:
    """Models keep the fields that the API has, and drop others."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    job = Job(words=("script.py", "--name", "a: b"), nodes=2, **more)
    (document,) = yaml.safe_load_all(job_file("kubeflow", job))
    read = TrainerV1alpha1TrainJob.from_dict(document)
    assert read is not None
    assert read.to_dict() == document
    trainer = read.spec.trainer
    assert (trainer.num_nodes, trainer.num_proc_per_node) == (2, job.processes)
    assert tuple(trainer.command[-3:]) == job.words
