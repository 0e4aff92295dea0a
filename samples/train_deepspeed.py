"""Training with a DeepSpeed engine: micro-batches, accumulated gradients, and checkpoints from which the same run goes on.

    torchrun --nproc_per_node 1 samples/train_deepspeed.py         # on clips that it makes
    torchrun --nproc_per_node 2 samples/train_deepspeed.py data    # on a folder as make_data.py makes it
    torchrun --nproc_per_node 2 samples/train_deepspeed.py data --steps 40 --resume

On the CPU DeepSpeed compiles a part of itself when it first runs, which takes a minute.
"""

import argparse
from pathlib import Path

import deepspeed
import torch.nn.functional as F

from gpupipe.cli.demo_data import make_clips
from gpupipe.cli.demo_model import TinyVideoNet  # any model that takes (B, 3, T, H, W)
from gpupipe.integrations.deepspeed import engine_loader, load_checkpoint, micro_batches, save_checkpoint

SETTINGS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 8e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with DeepSpeed.")
    parser.add_argument("data", type=Path, nargs="?", help="a folder as make_data.py makes it")
    parser.add_argument("--steps", type=int, default=20, help="of the optimizer (default: %(default)s)")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    folder = options.data or make_clips(Path("data"), train=10, val=2).folder
    model = TinyVideoNet(classes=6)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
    clips = {"clip": {"frames": 8, "stride": 2}, "transform": {"size": 56, "hflip": 0.0, "dtype": "float32"}}
    with engine_loader(engine, folder / "train.csv", **clips) as loader:
        if options.resume:
            load_checkpoint(engine, loader, "deepspeed_out")
        for batch in micro_batches(engine, loader, options.steps):
            loss = F.cross_entropy(engine(batch["video"]), batch["label"])
            engine.backward(loss)
            engine.step()
            if engine.micro_steps % 10 == 0:
                save_checkpoint(engine, loader, "deepspeed_out")
                print(f"epoch {batch.epoch}, step {engine.global_steps}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
