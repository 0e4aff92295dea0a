"""Fine-tuning a video model of transformers with its own Trainer, on VideoLoaders.

python samples/train_transformers.py                       # on clips that it makes, a small model without weights
torchrun --nproc_per_node 2 samples/train_transformers.py data
python samples/train_transformers.py data --resume         # from the last checkpoint in transformers_out
python samples/train_transformers.py data --model MCG-NJU/videomae-base --frames 16 --size 224
"""

import argparse
from pathlib import Path

import numpy as np
from transformers import AutoModelForVideoClassification, TrainingArguments, VideoMAEConfig, VideoMAEForVideoClassification

from gpupipe import VideoLoader
from gpupipe.cli.demo_data import make_clips
from gpupipe.integrations.hf import VideoTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a video model with transformers' Trainer.")
    parser.add_argument("data", type=Path, nargs="?", help="a folder as make_data.py makes it")
    parser.add_argument("--model", help="a name or folder of pretrained weights")
    parser.add_argument("--frames", type=int, default=8, help="of a clip (default: %(default)s)")
    parser.add_argument("--size", type=int, default=48, help="of a clip, in pixels (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="over all clips (default: %(default)s)")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    args = TrainingArguments(
        "transformers_out", num_train_epochs=options.epochs, learning_rate=1e-3, eval_strategy="epoch", save_steps=5,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to="none",
    )  # fmt: skip
    folder = options.data or make_clips(Path("data"), train=10, val=2).folder
    transform = {"size": options.size, "hflip": 0.0, "dtype": "float32", "layout": "NTCHW"}  # frames first, as VideoMAE has it
    clips = {"clip": {"frames": options.frames, "stride": 2}, "transform": transform, "device": str(args.device)}
    train = VideoLoader(folder / "train.csv", config=clips, batch=4)
    still = {**clips, "shuffle": False, "on_bad_file": "skip", "batch": {"size": 4, "last": "partial"}}
    val = VideoLoader(folder / "val.csv", config=still, clip={"sampling": "regular"}, transform={"crop": "none"})
    shape = {"image_size": options.size, "num_frames": options.frames, "num_labels": 6}
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    if options.model:
        model = AutoModelForVideoClassification.from_pretrained(options.model, **shape, ignore_mismatched_sizes=True)
    else:
        model = VideoMAEForVideoClassification(VideoMAEConfig(**shape, **small))

    def accuracy(given: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
        return {"accuracy": float((given[0].argmax(-1) == given[1]).mean())}

    trainer = VideoTrainer(model, args, train_dataset=train, eval_dataset=val, compute_metrics=accuracy)
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()
