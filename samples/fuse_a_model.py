"""Fused ops in a model of another package: a small video diffusion transformer of diffusers, fused, compared and trained.

pip install diffusers
python samples/fuse_a_model.py
"""

import argparse

import torch
from diffusers import WanTransformer3DModel

from gpupipe.train import compare, fuse, statistics

Batch = dict[str, torch.Tensor]


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Flow matching: the model says which way leads from noise to the clip's latents."""
    time = batch["time"].view(-1, 1, 1, 1, 1)
    mixed = (1 - time) * batch["latents"] + time * batch["noise"]
    said: torch.Tensor = model(mixed, batch["time"] * 1000, batch["text"], return_dict=False)[0]
    return (said - (batch["noise"] - batch["latents"])).square().mean()


def batch_of(size: int, device: str) -> Batch:
    """Stands for latents of a frozen autoencoder and a text encoder's words."""
    return {
        "latents": torch.rand(size, 4, 1, 1, 1, device=device).expand(size, 4, 4, 8, 8),
        "noise": torch.randn(size, 4, 4, 8, 8, device=device),
        "time": torch.rand(size, device=device),
        "text": torch.randn(size, 6, 32, device=device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuse a small diffusion transformer, compare it, train it.")
    parser.add_argument("--steps", type=int, default=20, help="of the optimizer (default: %(default)s)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=32, ffn_dim=256, num_layers=2
    ).to(options.device)  # fmt: skip

    print(fuse(model))
    print(compare(model, [batch_of(4, options.device) for _ in range(3)], loss_of))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        loss = loss_of(model, batch_of(4, options.device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}; {statistics.line()}")


if __name__ == "__main__":
    main()
