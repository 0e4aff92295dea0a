"""Ray: clips made by a stage of Ray Data, and training in Ray Train's workers, which go on from the last checkpoint.

python samples/train_ray.py                               # on clips that it makes
python samples/train_ray.py /shared/data --workers 8 --gpu  # a folder as make_data.py makes it, that all nodes see
"""

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer, prepare_model

from gpupipe.cli.demo_data import make_clips
from gpupipe.cli.demo_model import TinyVideoNet  # any model that takes (B, 3, T, H, W)
from gpupipe.integrations.ray import ClipMaker, report, worker_loader

CLIPS = {"clip": {"frames": 8, "stride": 2}, "transform": {"size": 56, "hflip": 0.0, "dtype": "float32"}}


def work(config: dict[str, Any]) -> None:
    net = TinyVideoNet(classes=6)
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            net.load_state_dict(torch.load(Path(folder, "model.pt"), map_location="cpu"))
    model = prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with worker_loader(config["videos"], batch=4, **CLIPS) as loader:
        for epoch in range(loader.state_dict()["epoch"], config["epochs"]):
            for batch in loader:
                loss = F.cross_entropy(model(batch["video"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            report({"epoch": epoch, "loss": loss.item()}, loader, lambda to: torch.save(net.state_dict(), to / "model.pt"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make clips and train with Ray.")
    parser.add_argument("data", type=Path, nargs="?", help="a folder as make_data.py makes it")
    parser.add_argument("--epochs", type=int, default=4, help="over all clips (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="of Ray Train (default: %(default)s)")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    folder = (options.data or make_clips(Path("data"), train=10, val=2).folder).resolve()
    rows = ray.data.from_items([{"path": str(path)} for path in sorted(folder.glob("val/*/*.mp4"))])
    clips = rows.map_batches(ClipMaker, fn_constructor_kwargs=CLIPS, batch_size=4, concurrency=1, num_gpus=int(options.gpu))
    print(f"{clips.count()} clips, the first one {clips.take(1)[0]['video'].shape}")
    scaling = ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpu)
    run = ray.train.RunConfig(name="train", storage_path=str(Path("ray_out").resolve()))
    told = {"videos": str(folder / "train.csv"), "epochs": options.epochs}
    print(TorchTrainer(work, train_loop_config=told, scaling_config=scaling, run_config=run).fit().metrics)


if __name__ == "__main__":
    main()
