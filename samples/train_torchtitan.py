"""torchtitan's loader, optimizers and checkpoints in a loop like its Trainer's; started again, it goes on.

    torchrun --nproc_per_node 2 samples/train_torchtitan.py                  # on clips that it makes
    torchrun --nproc_per_node 1 samples/train_torchtitan.py data --steps 40  # on a folder as make_data.py makes it
With its Trainer itself, which needs GPUs and its own models: ``Trainer.Config(dataloader=VideoDataLoader.Config(…), …)``.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from gpupipe.cli.demo_data import make_clips
from gpupipe.cli.demo_model import TinyVideoNet  # any model that takes (B, 3, T, H, W)
from gpupipe.integrations.torchtitan import VideoDataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path, nargs="?", help="a folder as make_data.py makes it")
    parser.add_argument("--steps", type=int, default=20, help="of the optimizer (default: %(default)s)")
    options = parser.parse_args()
    dist.init_process_group()
    device = f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu"
    folder = options.data or make_clips(Path("data"), train=10, val=2).folder
    clips = {"clip": {"frames": 8, "stride": 2}, "transform": {"size": 56, "hflip": 0.0, "dtype": "float32"}}
    data = VideoDataLoader.Config(loader={"videos": str(folder / "train.csv"), "device": device, **clips})
    loader = data.build(dp_world_size=dist.get_world_size(), dp_rank=dist.get_rank(), local_batch_size=4)
    model = TinyVideoNet(classes=6).to(device)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 8e-3})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="foreach").build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=options.steps)
    step = torch.tensor(0)
    parts = {"model_parts": [model], "optimizers": optimizers, "lr_schedulers": schedules, "states": {"run": {"step": step}}}
    policy = CheckpointManager.Config(enable=True, interval=5, last_save_model_only=False)
    checkpoints = policy.build(dataloader=loader, sd_adapter=None, base_folder="torchtitan_out", **parts)
    checkpoints.load()
    batches, parallel = iter(loader), DistributedDataParallel(model)
    while step < options.steps:
        inputs, labels = next(batches)
        loss = F.cross_entropy(parallel(inputs["input"]), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.step()
        optimizers.zero_grad()
        schedules.step()
        step += 1
        checkpoints.save(int(step), last_step=bool(step == options.steps))
        print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.3f}")
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
