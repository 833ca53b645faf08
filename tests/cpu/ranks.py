"""Run a function in several processes that form a gloo group, for tests of what only processes show."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

# Forking is twenty times faster than a fresh interpreter with torch; CUDA does not survive it.
_CONTEXT = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_seconds: float = 300.0
) -> list[Any]:
    """``function(rank, *arguments)`` in `num_ranks` processes; what each returned, in order of rank."""
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads torch._dynamo
    with tempfile.TemporaryDirectory() as directory:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            _CONTEXT.Process(target=_run, args=(function, rank, num_ranks, directory, writer, arguments), daemon=True)
            for rank, (_, writer) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            answers = [_answer(reader, timeout_seconds, rank) for rank, (reader, _) in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(timeout=30)
                if process.is_alive():
                    process.kill()
                    process.join()
    failures = [text for failed, text in answers if failed]
    assert not failures, "\n".join(failures)
    return [value for _, value in answers]


def _answer(reader: Connection, timeout_seconds: float, rank: int) -> tuple[bool, Any]:
    if not reader.poll(timeout_seconds):
        return True, f"rank {rank} did not answer within {timeout_seconds} s"
    try:
        return reader.recv()
    except EOFError:
        return True, f"rank {rank} ended without an answer"


def _run(
    function: Callable[..., Any], rank: int, num_ranks: int, directory: str, writer: Connection, arguments: tuple[Any]
) -> None:
    gc.freeze()  # a collection looks through what this process makes, not through all that its parent has loaded
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=num_ranks)
        value = function(rank, *arguments)
        dist.destroy_process_group()
        writer.send((False, value))
    except BaseException:
        writer.send((True, f"rank {rank}: {traceback.format_exc()}"))
