"""Diffusion models."""

from typing import Any

import torch

from research.plain_models.registry import Built, plain_model, simple


@plain_model("diffusers", "diffusion", name="UNet2DConditionModel")
def unet() -> Built:
    """Self- and cross-attention at several resolutions."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=13,
        attention_head_dim=2,
    )
    return Built(
        model,
        simple(model, torch.randn(2, 4, 8, 8), torch.tensor([3, 5]), torch.randn(2, 7, 13)).cases,
        cross=("attn2",),
    )


@plain_model("diffusers", "diffusion", name="DiTTransformer2DModel")
def dit() -> Built:
    """Transformer with adaptive norms."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        norm_num_groups=4,
        sample_size=8,
        num_embeds_ada_norm=10,
    )
    return simple(model, torch.randn(2, 4, 8, 8), timestep=torch.tensor([3, 5]), class_labels=torch.tensor([1, 2]))


@plain_model("diffusers", "diffusion", name="PixArtTransformer2DModel")
def pixart() -> Built:
    """Transformer with cross-attention to a padded text."""
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=24,
        caption_channels=13,
        sample_size=8,
        norm_num_groups=4,
        use_additional_conditions=False,
    )
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    options: dict[str, Any] = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    case = simple(
        model,
        torch.randn(2, 4, 8, 8),
        encoder_hidden_states=torch.randn(2, 5, 13),
        timestep=torch.tensor([3, 5]),
        encoder_attention_mask=mask,
        **options,
    )
    return Built(model, case.cases, cross=("attn2",))


@plain_model("diffusers", "diffusion", name="SD3Transformer2DModel")
def sd3() -> Built:
    """Joint attention of text and picture."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=13,
        caption_projection_dim=24,
        pooled_projection_dim=11,
        out_channels=4,
        pos_embed_max_size=8,
    )
    return simple(model, torch.randn(2, 4, 8, 8), torch.randn(2, 5, 13), torch.randn(2, 11), torch.tensor([3, 5]))


@plain_model("diffusers", "diffusion", name="FluxTransformer2DModel")
def flux() -> Built:
    """Joint attention of two streams, then of one."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=13,
        pooled_projection_dim=11,
        axes_dims_rope=(2, 2, 4),
    )
    return simple(
        model,
        torch.randn(2, 9, 4),
        torch.randn(2, 5, 13),
        torch.randn(2, 11),
        torch.tensor([0.3, 0.5]),
        torch.zeros(9, 3),
        torch.zeros(5, 3),
    )


@plain_model("diffusers", "diffusion", name="AutoencoderKL")
def autoencoder() -> Built:
    """One head over the positions of a picture."""
    from diffusers import AutoencoderKL

    return simple(
        AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, layers_per_block=1), torch.randn(2, 3, 8, 8)
    )


@plain_model("diffusers", "diffusion", name="UNet2DModel, own softmax")
def unet_plain() -> Built:
    """Attention of diffusers without the fused function, with heads in the batch axis."""
    from diffusers import UNet2DModel
    from diffusers.models.attention_processor import Attention, AttnProcessor

    model = UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor())
    return simple(model, torch.randn(2, 3, 8, 8), torch.tensor([3, 5]))


@plain_model("diffusers", "diffusion", name="WanTransformer3DModel")
def wan() -> Built:
    """Video."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=3,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=13,
        freq_dim=16,
        ffn_dim=17,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return Built(
        model,
        simple(model, torch.randn(1, 4, 2, 4, 4), torch.tensor([3]), torch.randn(1, 5, 13)).cases,
        cross=("attn2",),
    )


@plain_model("diffusers", "diffusion", name="PriorTransformer")
def prior() -> Built:
    """Causal transformer over embeddings."""
    from diffusers import PriorTransformer

    model = PriorTransformer(
        num_attention_heads=3,
        attention_head_dim=6,
        num_layers=2,
        embedding_dim=8,
        num_embeddings=5,
        additional_embeddings=4,
    )
    return simple(model, torch.randn(2, 8), 3, torch.randn(2, 8), torch.randn(2, 5, 8))


@plain_model("diffusers", "diffusion", name="StableAudioDiTModel")
def stable_audio() -> Built:
    """Grouped queries in cross-attention."""
    from diffusers import StableAudioDiTModel

    model = StableAudioDiTModel(
        sample_size=8,
        in_channels=4,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=8,
        time_proj_dim=8,
        global_states_input_dim=16,
        cross_attention_input_dim=8,
    )
    return Built(
        model,
        simple(
            model, torch.randn(2, 4, 8), torch.tensor([3.0, 5.0]), torch.randn(2, 5, 8), torch.randn(2, 1, 16)
        ).cases,
        cross=("attn2",),
    )


@plain_model("monai", "diffusion", name="DiffusionModelUNet")
def monai_unet() -> Built:
    """Attention to a context."""
    from monai.networks.nets import DiffusionModelUNet

    model = DiffusionModelUNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        num_res_blocks=(1,),
        channels=(8,),
        attention_levels=(True,),
        norm_num_groups=4,
        num_head_channels=4,
        with_conditioning=True,
        cross_attention_dim=7,
    )
    return Built(
        model,
        simple(model, torch.randn(2, 1, 8, 8), torch.tensor([3, 5]), context=torch.randn(2, 5, 7)).cases,
        cross=("attn2",),
    )


@plain_model("denoising-diffusion-pytorch", "diffusion", name="Unet")
def denoising_unet() -> Built:
    """Attention with learned keys, and linear attention."""
    from denoising_diffusion_pytorch.denoising_diffusion_pytorch import Unet

    model = Unet(dim=8, dim_mults=(1, 2), attn_heads=3, attn_dim_head=6, flash_attn=True)
    return simple(model, torch.randn(2, 3, 8, 8), torch.tensor([3, 5]))
