"""An ordinary PyTorch training loop, with VideoLoader in the place of a DataLoader.

    python samples/make_data.py data
    python samples/02_train_loop.py data           # or demo_out/clips, which `make demo` leaves

Batches are already on the device: there is no .to(device), no collate function and no worker process.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from gpupipe import VideoLoader
from gpupipe.cli.demo_model import TinyVideoNet  # any model that takes (B, 3, T, H, W)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model on clips made by make_data.py.")
    parser.add_argument("data", type=Path, help="a folder as make_data.py makes it: with train.csv and val.csv")
    parser.add_argument("--epochs", type=int, default=16, help="over all clips (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    options = parser.parse_args()
    if not (options.data / "train.csv").is_file():
        parser.error(f"{options.data} has no train.csv: give the folder of make_data.py, or demo_out/clips after `make demo`")

    clip = {"frames": 8, "stride": 2}
    # hflip=0: a flip would turn the class "left" into "right".
    transform = {"size": 56, "scale": (0.6, 1.0), "hflip": 0.0, "dtype": "float32"}
    train = VideoLoader(options.data / "train.csv", clip=clip, transform=transform, batch=16, device=options.device)
    val = VideoLoader(
        options.data / "val.csv",
        clip=clip,
        transform={**transform, "crop": "none"},
        batch={"size": 32, "last": "partial"},
        device=options.device,
        shuffle=False,
    )
    torch.manual_seed(0)
    model = TinyVideoNet(classes=6).to(train.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=options.epochs * len(train), pct_start=0.2)

    with train, val:
        for epoch in range(options.epochs):
            model.train()
            for batch in train:
                loss = F.cross_entropy(model(batch["video"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            model.eval()
            val.set_epoch(0)  # the same frames every time
            with torch.no_grad():
                hits = [(model(batch["video"]).argmax(dim=1) == batch["label"]) for batch in val]
            print(f"epoch {epoch}: loss {loss.item():.3f}, validation accuracy {100 * torch.cat(hits).float().mean():.1f} %")


if __name__ == "__main__":
    main()
