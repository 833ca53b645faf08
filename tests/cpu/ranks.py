"""Run a function in several processes that form a gloo group, for tests of what only processes show."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_SECONDS_AFTER_FAILURE = 20.0
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
        answers: dict[int, tuple[bool, Any]] = {}
        try:
            _receive(answers, [reader for reader, _ in pipes], timeout_seconds)
        finally:
            for rank, process in enumerate(processes):
                process.join(timeout=30 if rank in answers else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    failures = [text for failed, text in answers.values() if failed]
    failures += [f"rank {rank} did not answer" for rank in range(num_ranks) if rank not in answers]
    assert not failures, "\n".join(failures)
    return [answers[rank][1] for rank in range(num_ranks)]


def _receive(answers: dict[int, tuple[bool, Any]], readers: list[Connection], timeout_seconds: float) -> None:
    """What each rank returned, or the text of its failure. After a failure the others have few seconds left."""
    deadline, waiting = time.monotonic() + timeout_seconds, {reader: rank for rank, reader in enumerate(readers)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for reader in wait(list(waiting), left):
            rank = waiting.pop(reader)  # type: ignore[arg-type]
            try:
                answers[rank] = reader.recv()  # type: ignore[union-attr]
            except EOFError:
                answers[rank] = True, f"rank {rank} ended without an answer"
            if answers[rank][0]:
                deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_FAILURE)


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
