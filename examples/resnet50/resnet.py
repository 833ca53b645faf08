"""ResNet-50 as a chain of layers (He, Zhang, Ren and Sun, arXiv:1512.03385, table 1)."""

from __future__ import annotations

from torch import Tensor, nn

BLOCKS = (3, 4, 6, 3)  # bottlenecks per group
DOWNSAMPLING = 32  # pixels of an image per pixel of the last layers
EXPANSION = 4  # channels of a group, per channel of its 3x3 convolutions


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (figure 5): [N, C, H, W] -> [N, 4 * width, ...]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


def resnet50(width: int = 64, classes: int = 1000) -> nn.Sequential:
    """Images [N, 3, H, W] -> logits [N, classes]: a stem, 16 bottlenecks and a head, 18 layers in all.

    Args:
        width: channels behind the stem; 64 in the paper.
        classes: number of classes.
    """
    layers: list[nn.Module] = [
        nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
    ]
    channels = width
    for group, count in enumerate(BLOCKS):
        for block in range(count):
            stride = 2 if group and not block else 1
            layers.append(Bottleneck(channels, width * 2**group, stride))
            channels = EXPANSION * width * 2**group
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)))
    return nn.Sequential(*layers)
