"""The demo's model: a small 3-D convolutional network, made to be trained on two CPU cores in a minute."""

from __future__ import annotations

import torch
from torch import nn


class TinyVideoNet(nn.Module):
    """Four convolutions over time and space on the differences of neighbouring frames; about 190 000 parameters.

    In the differences what stands still falls away, so a few hundred clips suffice to learn motion. Time is not shrunk
    before the third layer: the order of frames is all that tells the demo's classes apart.

    Shapes: (B, 3, T, H, W) float in, (B, classes) logits out; any T >= 2 and any H, W.
    """

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _layer(3, width, kernel=(3, 7, 7), stride=(1, 4, 4)),
            _layer(width, 2 * width, kernel=(3, 3, 3), stride=(1, 2, 2)),
            _layer(2 * width, 4 * width, kernel=(3, 3, 3), stride=(2, 1, 1)),
            _layer(4 * width, 4 * width, kernel=(3, 3, 3), stride=(1, 2, 2)),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        motion = video[:, :, 1:] - video[:, :, :-1]
        logits: torch.Tensor = self.head(self.features(motion).mean(dim=(2, 3, 4)))
        return logits


def _layer(inputs: int, outputs: int, *, kernel: tuple[int, int, int], stride: tuple[int, int, int]) -> nn.Sequential:
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)
    )
