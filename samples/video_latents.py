"""Clips as latents of a frozen autoencoder, and back: what a latent diffusion model learns in the place of pixels."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from gpupipe.errors import ConfigError

RANDOM = "random"
TINY: dict[str, Any] = {
    "base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [True, True],
    "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "scale_factor_temporal": 4, "scale_factor_spatial": 4,
}  # fmt: skip
"""Of an autoencoder with weights that are drawn, which shows how all of it works."""


class Latents:
    """The autoencoder of Wan (Wan Team 2025) in diffusers: four frames a latent frame, the first one by itself.

    It keeps what it has seen of a clip while it is at it, so one thread at a time has it: batches are encoded beside the
    training, samples decoded in it.

    Args:
        name: a folder of an autoencoder, a model on the Hugging Face hub with its folder ``vae``, or ``random``.
        device: where it works; in bfloat16 on a GPU.
        at_once: clips that go through it together: its memory is theirs, however large a batch is.

    Raises:
        SystemExit: without diffusers.
        ConfigError: for an autoencoder that is not there.
    """

    def __init__(self, name: str, device: torch.device, at_once: int = 1, **config: Any) -> None:
        try:
            from diffusers import AutoencoderKLWan
        except ImportError as error:
            raise SystemExit(f"latents need diffusers ({error}): pip install diffusers") from error
        if name == RANDOM:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                made = AutoencoderKLWan(**(config or TINY))
        else:
            alone = (Path(name) / "config.json").exists()
            try:
                made = AutoencoderKLWan.from_pretrained(name, **({} if alone else {"subfolder": "vae"}))
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise ConfigError(f"--vae {name}: {reason}", fix="give a folder, a model's name, or random") from error
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        made = made.requires_grad_(False).eval().to(device)
        self.vae: Any = made if self.dtype == torch.float32 else made.to(self.dtype)
        self.at_once, self._mine = at_once, threading.Lock()
        shape = (1, -1, 1, 1, 1)
        self._mean, self._std = (
            torch.tensor(values, device=device).view(shape) for values in (made.config.latents_mean, made.config.latents_std)
        )

    def shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, t, h, w) of a clip of so many frames.

        Raises:
            SystemExit: for a length or a size that it cannot give back.
        """
        along, across = self.vae.config.scale_factor_temporal, self.vae.config.scale_factor_spatial
        if (frames - 1) % along or height % across or width % across:
            asked = f"{frames} frames of {height} x {width} pixels"
            raise SystemExit(f"this autoencoder takes {along} n + 1 frames of {across} n x {across} m pixels, not {asked}")
        return self.vae.config.z_dim, (frames - 1) // along + 1, height // across, width // across

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """Clips (B, 3, T, H, W) of -1 to 1 to the means of their latents (B, C, t, h, w), float32, about normal."""
        with self._mine:
            parts = [
                self.vae.encode(part.to(self.dtype)).latent_dist.mode().float() for part in torch.split(video, self.at_once)
            ]
        return (torch.cat(parts) - self._mean) / self._std

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The other way."""
        with self._mine:
            wide = (latents * self._std + self._mean).to(self.dtype)
            return torch.cat([self.vae.decode(part).sample.float() for part in torch.split(wide, self.at_once)])
