"""ResNet-50 on two devices in four ways, compared and timed over the split size.

    naive       the layers on two devices; one of them computes at a time
    loop        the batch in splits; the second device computes a split while the first one computes the next
    pipe        pl.Pipe, one process
    pipeline    pl.Pipeline, one process per device, under torchrun

    python examples/resnet50/compare.py                           two partitions on the CPU, small images
    python examples/resnet50/compare.py --devices cuda:0,cuda:1 --image 224 --batch 64 --splits 1,2,4,8,16,32

First, the logits and gradients of all ways are compared in float64 with those of the plain model; BatchNorm is in eval
mode there, since it normalizes each split by itself in train mode. Then steps are timed, and the curve is written to
resnet50.svg. On CUDA, kernels run while Python starts the next ones, so even the loop overlaps; on the CPU it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from resnet import DOWNSAMPLING, resnet50

import pipeloom as pl
from pipeloom.report.chart_picture import chart_picture
from pipeloom.report.line_chart import Series

loss_fn = nn.functional.cross_entropy


def naive(parts: list[nn.Sequential], devices: list[str], images: Tensor) -> Tensor:
    first, second = parts
    return second(first(images.to(devices[0])).to(devices[1]))


def loop(parts: list[nn.Sequential], devices: list[str], images: Tensor, split: int) -> Tensor:
    first, second = parts
    logits = []
    waiting = None  # what the first device made last
    for piece in images.split(split):
        if waiting is not None:
            logits.append(second(waiting))
        waiting = first(piece.to(devices[0])).to(devices[1])
    logits.append(second(waiting))
    return torch.cat(logits)


def build(options: argparse.Namespace, dtype: torch.dtype) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Model, images and labels: the same in every process."""
    torch.manual_seed(0)
    model = resnet50(options.width, options.classes).to(dtype)
    images = torch.randn(options.batch, 3, options.image, options.image, dtype=dtype)
    return model, images, torch.randint(options.classes, (options.batch,))


def gradients(names: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: parameter.grad.cpu().clone() for name, parameter in names if parameter.grad is not None}


def seconds_of(step: Callable[[], object], rounds: int, devices: list[str]) -> float:
    """Median seconds per step, after one that is not counted."""
    found = []
    for _ in range(rounds + 1):
        begin = perf_counter()
        step()
        for device in devices:
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
        found.append(perf_counter() - begin)
    return median(found[1:])


def pipeline(options: argparse.Namespace) -> None:
    """One of two processes under torchrun: writes its gradients and its times into options.out."""
    device = options.devices[int(os.environ["LOCAL_RANK"])]
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    torch.set_num_threads(max(1, options.threads // 2))
    found, _ = pipeline_step(options, device, options.splits[0], torch.float64)
    save_file(found, options.out / f"rank{dist.get_rank()}.safetensors")
    times = {split: pipeline_step(options, device, split, torch.float32)[1] for split in options.splits}
    if dist.get_rank() == 0:
        (options.out / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def pipeline_step(
    options: argparse.Namespace, device: str, split: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], float]:
    """Gradients of this process's stage, and seconds per step; in float64, BatchNorm is in eval mode."""
    model, images, labels = build(options, dtype)
    model.train(dtype != torch.float64).to(device)  # both stages; `Pipeline` keeps that of this rank
    schedule = pl.schedules.gpipe(num_ranks=2, num_microbatches=options.batch // split)
    cut = [options.cut, len(model) - options.cut]
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, cut=cut) as pipe:

        def step() -> None:
            for parameter in pipe.parameters():
                parameter.grad = None
            pipe.step(images.to(device), labels.to(device))

        if dtype == torch.float64:
            step()
            return gradients(pipe.named_parameters()), 0.0
        return {}, seconds_of(step, options.rounds, [device])


def run_pipeline(options: argparse.Namespace) -> tuple[dict[str, Tensor], dict[int, float]]:
    """Gradients and times of `pipeline`, which two processes of torchrun run."""
    with tempfile.TemporaryDirectory() as directory:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        subprocess.run([*words, *sys.argv[1:], "--out", directory], check=True)
        out = Path(directory)
        found = load_file(out / "rank0.safetensors") | load_file(out / "rank1.safetensors")
        return found, {int(split): seconds for split, seconds in json.loads((out / "times.json").read_text()).items()}


def ways_of(model: nn.Sequential, options: argparse.Namespace, split: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The three ways of one process, with the same layers."""
    devices = options.devices
    parts = [model[: options.cut].to(devices[0]), model[options.cut :].to(devices[1])]
    balance = [len(part) for part in parts]
    chunks = options.batch // split
    pipe = pl.Pipe(model, balance, devices=devices, chunks=chunks, checkpoint="never", deferred_batch_norm=False)
    return {
        "naive": lambda images: naive(parts, devices, images),
        "loop": lambda images: loop(parts, devices, images, split),
        "pipe": pipe,
    }


def compare(options: argparse.Namespace, of_pipeline: dict[str, Tensor]) -> None:
    """Print the largest differences from the plain model, relative to the largest value."""
    model, images, labels = build(options, torch.float64)
    expected = model.eval()(images)
    loss_fn(expected, labels).backward()
    expected = expected.detach()
    reference = gradients(model.named_parameters())
    scale = max(float(each.abs().max()) for each in reference.values())

    def off(found: dict[str, Tensor]) -> float:
        assert found.keys() == reference.keys()
        return max(float((found[name] - each).abs().max()) for name, each in reference.items()) / scale

    print(f"{'way':<10}logits      gradients   (differences from the plain model, float64)")
    for name, way in ways_of(model, options, options.splits[0]).items():
        model.zero_grad()
        logits = way(images)
        loss_fn(logits, labels.to(logits.device)).backward()
        apart = float((logits.detach().cpu() - expected).abs().max() / expected.abs().max())
        print(f"{name:<10}{apart:<12.1e}{off(gradients(model.named_parameters())):.1e}")
    print(f"{'pipeline':<10}{'':<12}{off(of_pipeline):.1e}")


def sizes(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def fault(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, or None."""
    if len(options.devices) != 2:
        return f"--devices {','.join(options.devices)}: must name two devices."
    for split in options.splits:
        if not 1 <= split <= options.batch:
            return f"--splits {split}: must be from 1 to the samples of a batch, {options.batch}."
        smallest = options.batch % split or split
        if smallest == 1 and options.image <= DOWNSAMPLING:
            return (
                f"--splits {split}: leaves a split of one sample, of which --image {options.image} leaves one value "
                "per channel in the last layers, and BatchNorm needs two. "
                f"Use --image {DOWNSAMPLING + 1} or more, or other splits."
            )
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="ResNet-50 on two devices in four ways.")
    parser.add_argument("--devices", type=lambda text: text.split(","), default=["cpu", "cpu"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=64, help="height and width of the images")
    parser.add_argument("--width", type=int, default=64, help="channels behind the stem")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--cut", type=int, default=8, help="layers on the first device")
    parser.add_argument("--splits", type=sizes, default=[1, 2, 4, 8], help="samples per split, one run each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of all devices on the CPU together"
    )
    parser.add_argument("--svg", type=Path, default=Path("resnet50.svg"))
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (wrong := fault(options)) is not None:
        parser.error(wrong)
    if "RANK" in os.environ:
        pipeline(options)
        return
    torch.set_num_threads(options.threads)
    found, times = run_pipeline(options)
    compare(options, found)
    model, images, labels = build(options, torch.float32)
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in ("naive", "loop", "pipe", "pipeline")}
    for split in options.splits:
        for name, way in ways_of(model, options, split).items():

            def step(way: Callable[[Tensor], Tensor] = way) -> None:
                model.zero_grad()
                logits = way(images)
                loss_fn(logits, labels.to(logits.device)).backward()

            curves[name].append((split, seconds_of(step, options.rounds, options.devices) * 1e3))
        curves["pipeline"].append((split, times[split] * 1e3))
    print("ms per step by split size")
    print(f"{'split':<10}" + "".join(f"{name:<10}" for name in curves))
    for index, split in enumerate(options.splits):
        print(f"{split:<10}" + "".join(f"{points[index][1]:<10.1f}" for points in curves.values()))
    series = [
        Series(label=name, points=points, style=style, marks=True)
        for (name, points), style in zip(curves.items(), "abcd", strict=True)
    ]
    title = f"ResNet-50, batch {options.batch}, ms per step by split size"
    options.svg.write_text(chart_picture(series, title=title, x_label="split size"))
    print(f"wrote {options.svg}")


if __name__ == "__main__":
    main()
