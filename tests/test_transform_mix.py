"""MixUp, CutMix and label smoothing: torchvision's results on the finished batch, and draws that a run repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupipe import ConfigError, VideoLoader
from gpupipe.config import MixConfig
from gpupipe.data.transform.mix import MixParams, draw, mix, soft_labels

LABELS = torch.tensor([2, 0, 1, 2])


def a_batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.from_numpy(np.random.default_rng(0).random((4, 3, 2, 20, 30))) * 200).to(dtype)


@pytest.mark.parametrize("params", [MixParams(0.3), MixParams(1 - 5 * 6 / 600, (3, 4, 5, 6)), MixParams()])
def test_a_batch_is_torchvisions(params: MixParams) -> None:
    from torchvision_v2 import torchvision_v2

    v2 = torchvision_v2()
    video = a_batch()
    if params.box is None:
        theirs, drawn = v2.MixUp(num_classes=3), {"lam": params.share}
    else:
        top, left, height, width = params.box
        theirs, drawn = v2.CutMix(num_classes=3), {"box": (left, top, left + width, top + height), "lam_adjusted": params.share}
    drawn |= {"labels": LABELS, "batch_size": 4}
    expected = theirs.transform(video.flatten(1, 2), drawn).view_as(video), theirs.transform(LABELS, drawn)
    ours = video.clone()
    mix(ours, params)
    torch.testing.assert_close(ours, expected[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(soft_labels(LABELS, params, MixConfig(num_classes=3)), expected[1].float())


def test_without_torchvision_the_formulas_hold() -> None:
    video, before = a_batch(), a_batch()
    mix(video, MixParams(0.25))
    torch.testing.assert_close(video, 0.25 * before + 0.75 * before.roll(1, 0))
    codes = a_batch(torch.uint8)
    mix(codes, MixParams(0.25))
    expected = (0.25 * a_batch(torch.uint8).float() + 0.75 * a_batch(torch.uint8).roll(1, 0).float()).round()
    assert torch.equal(codes.float(), expected)
    smooth = soft_labels(LABELS, MixParams(), MixConfig(num_classes=3, label_smoothing=0.3))
    torch.testing.assert_close(smooth[0], torch.tensor([0.1, 0.1, 0.8]))
    torch.testing.assert_close(smooth.sum(1), torch.ones(4))


def test_draws_follow_beta_and_cut_as_much_as_they_say() -> None:
    rng = np.random.default_rng(0)
    both = [draw(MixConfig(num_classes=9, mixup=0.4, cutmix=1.0, p=0.8), (20, 30), rng) for _ in range(3000)]
    shares = [p.share for p in both if p.box is None and p.share < 1]
    cuts = [p for p in both if p.box is not None]
    assert abs(sum(p == MixParams() for p in both) / 3000 - 0.2) < 0.04
    assert abs(len(cuts) / 3000 - 0.4) < 0.05
    assert abs(np.mean(shares) - 0.5) < 0.05
    assert abs(np.var(shares) - 0.25 / (2 * 0.4 + 1)) < 0.02  # of Beta(a, a): 1 / (4 (2 a + 1))
    for p in cuts:
        top, left, height, width = p.box or (0, 0, 0, 0)
        assert 0 <= top <= top + height <= 20
        assert 0 <= left <= left + width <= 30
        assert p.share == pytest.approx(1 - height * width / 600)


def _load(clips: dict[str, Path], rows: int = 4, **transform: Any) -> list[Any]:
    videos = [{"path": str(clips["h264"]), "label": k % 3} for k in range(rows)]
    config = {"size": 16, "dtype": "float32"} | transform
    with VideoLoader(videos, clip={"frames": 2}, transform=config, batch=4, device="cpu", shuffle=False) as loader:
        return list(loader)


def test_a_loader_mixes_whole_batches(clips: dict[str, Path]) -> None:
    """The clips before are those of a run without; the draw is the same every time."""
    (plain,), (mixed,), (again,) = (
        _load(clips, **given)
        for given in ({}, {"mix": {"mixup": 1, "num_classes": 3}}, {"mix": {"mixup": 1, "num_classes": 3}})
    )
    share = mixed.mix.share
    assert 0 < share < 1
    assert plain.mix is None
    torch.testing.assert_close(mixed.video, share * plain.video + (1 - share) * plain.video.roll(1, 0), rtol=0, atol=1e-6)
    assert mixed["label"].shape == (4, 3)
    assert mixed["label"][1].tolist() == pytest.approx([1 - share, share, 0])
    assert torch.equal(mixed.video, again.video)
    assert mixed.to("cpu").mix == mixed.mix


def test_labels_that_cannot_be_mixed_are_refused(clips: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"the label 2, transform\.mix.num_classes is 2"):
        _load(clips, mix={"num_classes": 2})
    with pytest.raises(ConfigError, match="needs a label for each video"):
        VideoLoader([str(clips["h264"])], transform={"mix": {"num_classes": 2}}, batch=1, device="cpu")
    with pytest.raises(ConfigError, match="num_classes"):
        MixConfig(mixup=1.0)
