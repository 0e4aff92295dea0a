"""Training with accelerate: accumulated gradients, and a checkpoint amid an epoch from which the same run goes on.

python samples/train_accelerate.py                                   # on clips that it makes
accelerate launch --num_processes 2 samples/train_accelerate.py data  # on a folder as make_data.py makes it
python samples/train_accelerate.py data --resume accelerate_out
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from gpupipe import VideoLoader
from gpupipe.cli.demo_data import make_clips
from gpupipe.cli.demo_model import TinyVideoNet  # any model that takes (B, 3, T, H, W)
from gpupipe.integrations.accelerate import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with accelerate.")
    parser.add_argument("data", type=Path, nargs="?", help="a folder as make_data.py makes it")
    parser.add_argument("--epochs", type=int, default=4, help="over all clips (default: %(default)s)")
    parser.add_argument("--resume", help="a folder of save_state")
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    with accelerator.main_process_first():
        folder = options.data or make_clips(Path("data"), train=10, val=2).folder
    clips = {"clip": {"frames": 8, "stride": 2}, "transform": {"size": 56, "hflip": 0.0, "dtype": "float32"}}
    device = str(accelerator.device)
    train = prepare(accelerator, VideoLoader(folder / "train.csv", config=clips, batch=4, device=device))
    rest = {"size": 4, "last": "partial"}
    val = VideoLoader(folder / "val.csv", config=clips, batch=rest, shuffle=False, device=device)
    model = TinyVideoNet(classes=6)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=8e-3))
    if options.resume:
        accelerator.load_state(options.resume)

    for epoch in range(train.epoch, options.epochs):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(batch["video"]), batch["label"]))
                optimizer.step()
                optimizer.zero_grad()
            if batch.index % 4 == 3:
                accelerator.save_state("accelerate_out")
        model.eval()
        val.set_epoch(0)  # the same frames every time
        with torch.no_grad():
            hits = [model(batch["video"]).argmax(dim=1) == batch["label"] for batch in val]
        accuracy = accelerator.gather_for_metrics(torch.cat(hits)).float().mean()
        accelerator.print(f"epoch {epoch}: validation accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
