"""Plain PyTorch with DistributedDataParallel under torchrun: each rank's loader takes its share of the videos by itself.

torchrun --nproc_per_node 2 samples/train_ddp.py [DATA --epochs 8]      # on clips that it makes, or as make_data.py does
torchrun --nproc_per_node 1 samples/train_ddp.py data --resume ddp.pt   # goes on, also with another number of ranks
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpupipe import VideoLoader
from gpupipe.cli.demo_data import make_clips
from gpupipe.cli.demo_model import TinyVideoNet  # any model that takes (B, 3, T, H, W)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path, nargs="?", help="a folder as make_data.py makes it")
    parser.add_argument("--epochs", type=int, default=8, help="over all clips (default: %(default)s)")
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    dist.init_process_group()  # before the loaders, which take rank and world size from it
    device = f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu"
    folder = options.data or make_clips(Path("data"), train=10, val=2).folder
    look = {"size": 56, "crop": "none", "hflip": 0, "dtype": "float32"}
    clips = {"clip": {"frames": 8, "stride": 2}, "transform": look, "device": device}
    train = VideoLoader(folder / "train.csv", config=clips, batch=4)
    val = VideoLoader(folder / "val.csv", config=clips, clip={"sampling": "regular"}, shuffle=False, batch=2)
    net = TinyVideoNet(classes=6).to(device)
    model, optimizer = DistributedDataParallel(net), torch.optim.AdamW(net.parameters(), lr=4e-3)
    if options.resume:
        saved = torch.load(options.resume, map_location=device)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train.load_state_dict(saved["loader"])
    for epoch in range(train.epoch, options.epochs):
        net.train()
        for batch in train:
            loss = torch.nn.functional.cross_entropy(model(batch["video"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if dist.get_rank() == 0 and batch.index % 2 == 1:  # one rank's state serves all
                saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "loader": train.state_dict()}
                torch.save(saved, "ddp.pt")
        val.set_epoch(0)  # the same frames every time
        net.eval()
        with torch.no_grad():
            hits = torch.cat([net(batch["video"]).argmax(dim=1) == batch["label"] for batch in val]).float().mean()
        dist.all_reduce(hits)
        print(f"rank {dist.get_rank()}, epoch {epoch}: validation accuracy {100 * hits / dist.get_world_size():.1f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
