"""Training with Lightning: a data module makes the loaders, and a checkpoint of the trainer says where the data stood.

python samples/train_lightning.py                      # on clips that it makes
python samples/train_lightning.py data --devices 2     # on a folder as make_data.py makes it
python samples/train_lightning.py data --resume lightning_out/last.ckpt
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from gpupipe.cli.demo_data import make_clips
from gpupipe.cli.demo_model import TinyVideoNet  # any model that takes (B, 3, T, H, W)
from gpupipe.integrations.lightning import VideoDataModule


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = TinyVideoNet(classes=6)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch["video"]), batch["label"])

    def validation_step(self, batch: Any, index: int) -> None:
        hits = self.net(batch["video"]).argmax(dim=1) == batch["label"]
        self.log("accuracy", hits.float().mean(), prog_bar=True, sync_dist=True, batch_size=len(hits))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=8e-3, weight_decay=0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with Lightning.")
    parser.add_argument("data", type=Path, nargs="?", help="a folder as make_data.py makes it")
    parser.add_argument("--epochs", type=int, default=4, help="over all clips (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="of the trainer (default: %(default)s)")
    parser.add_argument("--resume", help="a checkpoint")
    options = parser.parse_args()

    folder = options.data or make_clips(Path("data"), train=10, val=2).folder
    look = {"size": 56, "hflip": 0.0, "dtype": "float32"}
    clips: dict[str, Any] = {"clip": {"frames": 8, "stride": 2}, "transform": look, "batch": 8}
    val = {**clips, "videos": folder / "val.csv", "clip": {**clips["clip"], "sampling": "regular"}, "on_bad_file": "skip"}
    val["transform"] = {**look, "crop": "none"}
    data = VideoDataModule(train={"videos": folder / "train.csv", **clips}, val=val)
    checkpoints = ModelCheckpoint("lightning_out", save_last=True, every_n_train_steps=5)
    trainer = Trainer(max_epochs=options.epochs, devices=options.devices, callbacks=[checkpoints], logger=False)
    trainer.fit(Classifier(), datamodule=data, ckpt_path=options.resume)
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
