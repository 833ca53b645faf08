"""Files that start a run on a cluster: for torchrun, SLURM, Kubernetes, Kubeflow, Ray and SkyPilot. Needs no torch.

    Job ──templates/──> a script, manifest or program, which the scheduler takes as it is

Each file starts one torchrun per node (Ray: its own workers) and goes on from the newest checkpoint when the scheduler
starts it again.
"""

from pipeloom.job_files.job import SCHEDULERS, Job, job_file

__all__ = ["SCHEDULERS", "Job", "job_file"]
