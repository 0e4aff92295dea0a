"""Video models as people have them, each built from its own configuration at a tiny size, with what one step of it takes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torchvision_v2 import torchvision_v2

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """A model and its inputs.

    Attributes:
        package: that it comes from.
        build: the model, with parameters drawn from torch's generator.
        inputs: of one step, drawn from a generator.
        call: the tensor that a loss is made of.
        fused: how many modules of each kind are fused.
    """

    package: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Inputs]
    call: Callable[[nn.Module, Inputs], torch.Tensor]
    fused: dict[str, int]


def _sample(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    return model(**inputs, return_dict=False)[0]


def _logits(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    return model(**inputs).logits


def _plain(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    return model(inputs["video"])


def _draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def _steps(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(0, 1000, (count,), generator=generator)


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=48, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip


def wan_inputs(g: torch.Generator) -> Inputs:
    return {
        "hidden_states": _draw(g, 2, 4, 2, 4, 6),
        "timestep": _steps(g, 2),
        "encoder_hidden_states": _draw(g, 2, 5, 16),
    }


def hunyuan() -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, num_single_layers=2,
        num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    )  # fmt: skip


def hunyuan_inputs(g: torch.Generator) -> Inputs:
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    return {
        "hidden_states": _draw(g, 2, 4, 2, 4, 6),
        "timestep": _steps(g, 2),
        "encoder_hidden_states": _draw(g, 2, 5, 16),
        "encoder_attention_mask": mask,
        "pooled_projections": _draw(g, 2, 8),
        "guidance": torch.full((2,), 6000.0),
    }


def latte() -> nn.Module:
    from diffusers import LatteTransformer3DModel

    return LatteTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=24,
        attention_bias=True, sample_size=8, patch_size=2, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
        norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6, caption_channels=16, video_length=2,
    )  # fmt: skip


def latte_inputs(g: torch.Generator) -> Inputs:
    return {
        "hidden_states": _draw(g, 2, 4, 2, 8, 8),
        "timestep": _steps(g, 2),
        "encoder_hidden_states": _draw(g, 2, 5, 16),
    }


def cogvideox() -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16,
        num_layers=2, sample_width=6, sample_height=4, sample_frames=5, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=5, use_rotary_positional_embeddings=True,
    )  # fmt: skip


def cogvideox_inputs(g: torch.Generator) -> Inputs:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    tables = get_3d_rotary_pos_embed(16, ((0, 0), (2, 3)), (2, 3), 2)
    return {
        "hidden_states": _draw(g, 2, 2, 4, 4, 6),
        "timestep": _steps(g, 2),
        "encoder_hidden_states": _draw(g, 2, 5, 16),
        "image_rotary_emb": tables,
    }


def wan_vae() -> nn.Module:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4, z_dim=2, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.0, 0.0],
        latents_std=[1.0, 1.0],
    )  # fmt: skip


def hunyuan_vae() -> nn.Module:
    from diffusers import AutoencoderKLHunyuanVideo

    return AutoencoderKLHunyuanVideo(
        latent_channels=2, down_block_types=("HunyuanVideoDownBlock3D",) * 2, up_block_types=("HunyuanVideoUpBlock3D",) * 2,
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, spatial_compression_ratio=2,
        temporal_compression_ratio=4,
    )  # fmt: skip


def vae_inputs(g: torch.Generator) -> Inputs:
    return {"sample": _draw(g, 1, 3, 5, 8, 8)}


def videomae() -> nn.Module:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    return VideoMAEForVideoClassification(
        VideoMAEConfig(
            image_size=32, patch_size=16, num_frames=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=48, num_labels=5,
        )
    )  # fmt: skip


def timesformer() -> nn.Module:
    from transformers import TimesformerConfig, TimesformerForVideoClassification

    return TimesformerForVideoClassification(
        TimesformerConfig(
            image_size=32, patch_size=16, num_frames=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=48, num_labels=5,
        )
    )  # fmt: skip


def pixel_inputs(g: torch.Generator) -> Inputs:
    return {"pixel_values": _draw(g, 2, 4, 3, 32, 32)}


def mvit() -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 12, 24, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 24, 24, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return MViT(
        (16, 16), 4, blocks, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True, proj_after_attn=True,
        num_classes=5, stochastic_depth_prob=0.0, patch_embed_kernel=(3, 7, 7), patch_embed_stride=(2, 4, 4),
        patch_embed_padding=(1, 3, 3), dropout=0.0,
    )  # fmt: skip


def swin3d() -> nn.Module:
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    return SwinTransformer3d([2, 4, 4], 12, [2, 2], [3, 6], [2, 2, 2], stochastic_depth_prob=0.0, num_classes=5)


def video_inputs(g: torch.Generator) -> Inputs:
    return {"video": _draw(g, 2, 3, 4, 16, 16)}


def vit() -> nn.Module:
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2, num_classes=5, qk_norm=True, init_values=0.1
    )


def picture_inputs(g: torch.Generator) -> Inputs:
    return {"video": _draw(g, 2, 3, 32, 32)}


def encoded(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Through the whole autoencoder, its latents as they are."""
    latents = model.encode(inputs["sample"], return_dict=False)[0].mode()
    return model.decode(latents, return_dict=False)[0]


FAMILIES = {
    "wan": Family(
        "diffusers", wan, wan_inputs, _sample, {"attention": 4, "block": 2, "conv_block": 1, "mlp": 4, "norm": 7, "rotary": 1}
    ),
    "hunyuan": Family(
        "diffusers",
        hunyuan,
        hunyuan_inputs,
        _sample,
        {"attention": 4, "block": 3, "conv_block": 1, "mlp": 8, "modulated_norm": 5, "norm": 4, "rotary": 1},
    ),
    "latte": Family("diffusers", latte, latte_inputs, _sample, {"attention": 6, "block": 4, "mlp": 6, "norm": 9}),
    "cogvideox": Family(
        "diffusers",
        cogvideox,
        cogvideox_inputs,
        _sample,
        {"attention": 2, "block": 2, "mlp": 3, "modulated_norm": 5, "norm": 1},
    ),
    "wan vae": Family("diffusers", wan_vae, vae_inputs, encoded, {"conv_block": 18, "norm": 4}),
    "hunyuan vae": Family("diffusers", hunyuan_vae, vae_inputs, encoded, {"conv_block": 10, "group_norm": 4}),
    "videomae": Family(
        "transformers",
        videomae,
        pixel_inputs,
        _logits,
        {"attention": 2, "block": 2, "conv_block": 1, "linear_act": 4, "norm": 5, "positions": 1},
    ),
    "timesformer": Family("transformers", timesformer, pixel_inputs, _logits, {"attention": 4, "linear_act": 2, "norm": 7}),
    "mvit": Family("torchvision", mvit, video_inputs, _plain, {"mlp": 2, "norm": 11}),
    "swin3d": Family(
        "torchvision", swin3d, video_inputs, _plain, {"attention": 4, "block": 4, "conv_block": 1, "mlp": 4, "norm": 11}
    ),
    "vit": Family("timm", vit, picture_inputs, _plain, {"attention": 2, "block": 2, "mlp": 2, "norm": 5}),
}


def family(name: str) -> Family:
    """One of them, or a skip of the calling test where its package is not there."""
    found = FAMILIES[name]
    if importlib.util.find_spec(found.package) is None:
        pytest.skip(f"needs {found.package}")
    if importlib.util.find_spec("torchvision") is not None:  # the other packages import it where it is there
        torchvision_v2()
    importlib.import_module(found.package)
    return found
