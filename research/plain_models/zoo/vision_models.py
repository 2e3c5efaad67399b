"""Vision models."""

from typing import Any

import torch

from research.plain_models.registry import Built, plain_model, simple


def _timm(name: str, size: int = 32, **options: Any) -> None:
    """Register a model of timm, called with pictures of this size."""

    def build() -> Built:
        import timm

        return simple(timm.create_model(name, num_classes=5, **options), torch.randn(2, 3, size, size))

    plain_model("timm", "vision", name=name)(build)


VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 18, "depth": 2, "num_heads": 3}
_timm("vit_tiny_patch16_224", **VIT)
_timm("vit_small_patch14_dinov2", **VIT)
_timm("vit_small_patch14_reg4_dinov2", **VIT)
_timm("vit_base_patch16_clip_224", **VIT)
_timm("vit_so400m_patch14_siglip_224", **VIT)
_timm("deit_tiny_distilled_patch16_224", **VIT)
_timm("beit_base_patch16_224", **VIT)
_timm("beitv2_base_patch16_224", **VIT | {"use_rel_pos_bias": True})
_timm("eva02_tiny_patch14_224", **VIT | {"embed_dim": 24})
_timm("cait_xxs24_224", **VIT)
_timm("xcit_nano_12_p8_224", **VIT | {"embed_dim": 16, "num_heads": 2})
_timm(
    "swin_tiny_patch4_window7_224",
    img_size=32,
    patch_size=4,
    window_size=4,
    embed_dim=12,
    depths=(2, 1),
    num_heads=(2, 3),
)
_timm(
    "swinv2_tiny_window8_256", img_size=32, patch_size=4, window_size=4, embed_dim=12, depths=(2, 1), num_heads=(2, 3)
)
_timm("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 8, 12, 12), num_heads=(1, 2, 3, 3), sr_ratios=(4, 2, 1, 1))
_timm(
    "twins_pcpvt_small",
    img_size=32,
    depths=(1, 1, 1, 1),
    embed_dims=(8, 8, 12, 12),
    num_heads=(1, 2, 3, 3),
    sr_ratios=(4, 2, 1, 1),
)
_timm(
    "twins_svt_small",
    img_size=32,
    depths=(2, 1, 1, 1),
    embed_dims=(8, 8, 12, 12),
    num_heads=(1, 2, 3, 3),
    sr_ratios=(4, 2, 1, 1),
    wss=(4, 2, 1, 1),
)
_timm("convit_tiny", **VIT | {"local_up_to_layer": 1})
_timm(
    "crossvit_tiny_240",
    size=32,
    img_size=32,
    img_scale=(1.0, 1.0),
    patch_size=(8, 16),
    embed_dim=(12, 18),
    depth=((1, 1, 0),),
    num_heads=(3, 3),
)
_timm(
    "tnt_s_patch16_224",
    size=32,
    img_size=32,
    patch_size=16,
    embed_dim=18,
    inner_dim=12,
    depth=2,
    num_heads_inner=2,
    num_heads_outer=3,
)
_timm("visformer_tiny", size=64, img_size=64, init_channels=8, embed_dim=24, depth=(0, 1, 1), num_heads=3)
_timm("levit_128s", size=64, img_size=64, embed_dim=(16, 24, 32), key_dim=8, num_heads=(2, 3, 4), depth=(1, 1, 1))
_timm("edgenext_xx_small", size=64, dims=(8, 12, 12, 16), depths=(2, 2, 2, 2), heads=(2, 2, 2, 2))
_timm("hiera_tiny_224", size=64, img_size=(64, 64), embed_dim=12, num_heads=1, stages=(1, 1, 1, 1))
_timm("mobilevit_xxs", size=64)
_timm(
    "samvit_base_patch16",
    size=64,
    img_size=64,
    patch_size=16,
    embed_dim=18,
    depth=2,
    num_heads=3,
    window_size=2,
    global_attn_indexes=(1,),
)
_timm("vit_relpos_small_patch16_224", **VIT)


@plain_model("timm", "vision", name="attention pooling")
def timm_pool() -> Built:
    """Learned query that attends to all patches."""
    from timm.layers import AttentionPoolLatent

    model = AttentionPoolLatent(18, num_heads=3, latent_len=2)
    return Built(model, simple(model, torch.randn(2, 11, 18)).cases, cross=("",))


@plain_model("open_clip_torch", "multimodal", name="CLIP")
def open_clip() -> Built:
    """Picture and text towers."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=18, head_width=6, patch_size=8, image_size=16)
    text = CLIPTextCfg(context_length=11, vocab_size=29, width=18, heads=3, layers=2)
    return simple(CLIP(16, vision, text), torch.randn(2, 3, 16, 16), torch.randint(1, 29, (2, 11)))


@plain_model("open_clip_torch", "multimodal", name="CoCa")
def open_clip_coca() -> Built:
    """Picture tower with attention pooling, and a text decoder with cross-attention."""
    from open_clip.coca_model import CLIPTextCfg, CLIPVisionCfg, CoCa, MultimodalCfg

    vision = CLIPVisionCfg(
        layers=1,
        width=18,
        head_width=6,
        patch_size=8,
        image_size=16,
        attentional_pool=True,
        attn_pooler_heads=3,
        attn_pooler_queries=5,
        output_tokens=True,
    )
    text = CLIPTextCfg(
        context_length=11, vocab_size=29, width=18, heads=3, layers=1, embed_cls=True, output_tokens=True
    )
    decoder = MultimodalCfg(context_length=11, vocab_size=29, width=18, heads=3, layers=1)
    model = CoCa(18, decoder, text, vision)
    return Built(
        model,
        simple(model, torch.randn(2, 3, 16, 16), torch.randint(1, 29, (2, 10))).cases,
        cross=("attn_pool", "cross_attn"),
    )


@plain_model("segment-anything", "vision", name="SAM")
def sam() -> Built:
    """Encoder with windows and relative positions."""
    from segment_anything.modeling import ImageEncoderViT

    model = ImageEncoderViT(
        img_size=64,
        patch_size=16,
        embed_dim=18,
        depth=2,
        num_heads=3,
        out_chans=8,
        use_rel_pos=True,
        window_size=2,
        global_attn_indexes=(1,),
    )
    return simple(model, torch.randn(2, 3, 64, 64))


@plain_model("segment-anything", "vision", name="mask decoder")
def sam_decoder() -> Built:
    """Attention of points and picture to each other."""
    from segment_anything.modeling import TwoWayTransformer

    model = TwoWayTransformer(depth=1, embedding_dim=16, num_heads=2, mlp_dim=17)
    picture = torch.randn(2, 16, 3, 3)
    return Built(
        model,
        simple(model, picture, torch.randn(2, 16, 3, 3), torch.randn(2, 5, 16)).cases,
        cross=("cross_attn", "final_attn"),
    )


@plain_model("swin-transformer-pytorch", "vision")
def swin() -> Built:
    """Shifted windows."""
    from swin_transformer_pytorch import SwinTransformer

    model = SwinTransformer(
        hidden_dim=12,
        layers=(2, 2, 2, 2),
        heads=(3, 3, 3, 3),
        num_classes=5,
        head_dim=4,
        window_size=2,
        downscaling_factors=(2, 2, 2, 2),
    )
    return simple(model, torch.randn(1, 3, 32, 32))


@plain_model("bottleneck-transformer-pytorch", "vision")
def bottleneck() -> Built:
    """Attention over a picture's positions within a residual network."""
    from bottleneck_transformer_pytorch import BottleStack

    model = BottleStack(
        dim=16, fmap_size=6, dim_out=24, proj_factor=4, downsample=False, heads=3, dim_head=6, num_layers=1
    )
    return simple(model, torch.randn(2, 16, 6, 6))


@plain_model("axial-attention", "vision")
def axial() -> Built:
    """Attention along rows, then columns."""
    from axial_attention import AxialAttention

    return simple(AxialAttention(dim=15, dim_index=1, heads=3, num_dimensions=2), torch.randn(2, 15, 5, 7))


@plain_model("axial-attention", "vision", name="picture transformer")
def axial_transformer() -> Built:
    """Layers along each axis."""
    from axial_attention import AxialImageTransformer

    return simple(AxialImageTransformer(dim=12, depth=1, heads=3, reversible=False), torch.randn(2, 12, 5, 7))


@plain_model("kornia", "vision", name="ViT")
def kornia_vit() -> Built:
    """Vision transformer."""
    from kornia.models.vit import VisionTransformer

    return simple(
        VisionTransformer(image_size=16, patch_size=8, embed_dim=18, depth=2, num_heads=3), torch.randn(2, 3, 16, 16)
    )


@plain_model("kornia", "vision", name="LoFTR transformer")
def kornia_loftr() -> Built:
    """Linear and full attention between two pictures."""
    from kornia.feature.loftr.loftr_module.transformer import LocalFeatureTransformer

    model = LocalFeatureTransformer({"d_model": 18, "nhead": 3, "layer_names": ["self", "cross"], "attention": "full"})
    return Built(model, simple(model, torch.randn(2, 11, 18), torch.randn(2, 7, 18)).cases)


@plain_model("kornia", "vision", name="LightGlue layer")
def kornia_lightglue() -> Built:
    """Self-attention and attention in both directions between two sets of points."""
    from kornia.feature.lightglue import CrossBlock

    model = CrossBlock(18, 3)
    return Built(model, simple(model, torch.randn(2, 11, 18), torch.randn(2, 7, 18)).cases, cross=("",))


@plain_model("monai", "vision", name="ViT")
def monai_vit() -> Built:
    """Vision transformer in three dimensions."""
    from monai.networks.nets import ViT

    return simple(
        ViT(
            in_channels=1,
            img_size=(8, 8, 8),
            patch_size=(4, 4, 4),
            hidden_size=18,
            mlp_dim=17,
            num_layers=2,
            num_heads=3,
        ),
        torch.randn(2, 1, 8, 8, 8),
    )


@plain_model("monai", "vision", name="UNETR")
def monai_unetr() -> Built:
    """Segmentation with a transformer."""
    from monai.networks.nets import UNETR

    return simple(
        UNETR(
            in_channels=1,
            out_channels=2,
            img_size=32,
            feature_size=4,
            hidden_size=18,
            mlp_dim=17,
            num_heads=3,
            spatial_dims=2,
        ),
        torch.randn(2, 1, 32, 32),
    )


@plain_model("monai", "vision", name="SwinUNETR")
def monai_swin() -> Built:
    """Windows in two dimensions."""
    from monai.networks.nets import SwinUNETR

    return simple(
        SwinUNETR(
            in_channels=1,
            out_channels=2,
            feature_size=12,
            depths=(1, 1, 1, 1),
            num_heads=(3, 3, 3, 3),
            window_size=2,
            spatial_dims=2,
        ),
        torch.randn(1, 1, 64, 64),
    )


@plain_model("monai", "vision", name="cross-attention block")
def monai_cross() -> Built:
    """Cross-attention."""
    from monai.networks.blocks import CrossAttentionBlock

    model = CrossAttentionBlock(hidden_size=18, num_heads=3, hidden_input_size=18, context_input_size=13)
    return Built(model, simple(model, torch.randn(2, 11, 18), torch.randn(2, 7, 13)).cases, cross=("",))


@plain_model("self-attention-cv", "vision", name="ViT")
def cv_vit() -> Built:
    """Vision transformer."""
    from self_attention_cv import ViT

    return simple(
        ViT(
            img_dim=16,
            in_channels=3,
            patch_dim=8,
            num_classes=5,
            dim=18,
            blocks=2,
            heads=3,
            dim_linear_block=17,
            dim_head=6,
        ),
        torch.randn(2, 3, 16, 16),
    )


@plain_model("slot-attention", "vision")
def slots() -> Built:
    """Softmax over slots, that is over queries."""
    from slot_attention import SlotAttention

    return simple(SlotAttention(num_slots=3, dim=18, iters=2, hidden_dim=17), torch.randn(2, 11, 18))


@plain_model("perceiver-pytorch", "multimodal", name="Perceiver")
def perceiver() -> Built:
    """Latents attend to a picture."""
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3,
        input_axis=2,
        num_freq_bands=2,
        max_freq=4,
        depth=1,
        num_latents=5,
        latent_dim=18,
        cross_heads=2,
        latent_heads=3,
        cross_dim_head=6,
        latent_dim_head=6,
        num_classes=5,
    )
    return simple(model, torch.randn(2, 4, 4, 3))


@plain_model("perceiver-pytorch", "multimodal", name="Perceiver IO")
def perceiver_io() -> Built:
    """Latents, and queries of the output."""
    from perceiver_pytorch import PerceiverIO

    model = PerceiverIO(
        depth=1,
        dim=13,
        queries_dim=15,
        num_latents=5,
        latent_dim=18,
        cross_heads=2,
        latent_heads=3,
        cross_dim_head=6,
        latent_dim_head=6,
    )
    return simple(model, torch.randn(2, 11, 13), queries=torch.randn(2, 7, 15))


@plain_model("flamingo-pytorch", "multimodal", name="resampler")
def resampler() -> Built:
    """Latents attend to pictures and to themselves."""
    from flamingo_pytorch import PerceiverResampler

    return simple(
        PerceiverResampler(dim=18, depth=1, dim_head=6, heads=3, num_latents=5, num_media_embeds=2),
        torch.randn(2, 2, 7, 18),
    )


@plain_model("flamingo-pytorch", "multimodal", name="gated cross-attention")
def flamingo_cross() -> Built:
    """Text attends to the latest picture."""
    from flamingo_pytorch import GatedCrossAttentionBlock

    model = GatedCrossAttentionBlock(dim=18, dim_head=6, heads=3)
    torch.nn.init.ones_(model.attn_gate)
    locations = torch.zeros(2, 11, dtype=torch.bool)
    locations[:, 0] = True
    locations[:, 5] = True
    return Built(
        model,
        simple(model, torch.randn(2, 11, 18), torch.randn(2, 2, 5, 18), media_locations=locations).cases,
        cross=("",),
    )


@plain_model("x-clip", "multimodal")
def x_clip() -> Built:
    """Towers of text and pictures."""
    from x_clip import CLIP

    model = CLIP(
        dim_text=18,
        dim_image=18,
        dim_latent=16,
        num_text_tokens=29,
        text_enc_depth=1,
        text_seq_len=11,
        text_heads=3,
        text_dim_head=6,
        visual_enc_depth=1,
        visual_image_size=16,
        visual_patch_size=8,
        visual_heads=3,
        visual_dim_head=6,
    )
    return simple(model, torch.randint(1, 29, (2, 11)), torch.randn(2, 3, 16, 16))


@plain_model("coca-pytorch", "multimodal")
def coca() -> Built:
    """Parallel blocks, and cross-attention to a picture."""
    from coca_pytorch.coca_pytorch import CoCa

    model = CoCa(
        dim=18, img_encoder=None, image_dim=13, num_tokens=29, unimodal_depth=1, multimodal_depth=1, dim_head=6, heads=3
    )
    return simple(model, text=torch.randint(1, 29, (2, 11)), image_tokens=torch.randn(2, 7, 13))


@plain_model("robotic-transformer-pytorch", "multimodal", name="MaxViT")
def rt1() -> Built:
    """Attention within windows and grids."""
    from robotic_transformer_pytorch import MaxViT

    return simple(
        MaxViT(num_classes=5, dim_conv_stem=8, dim=8, dim_head=4, depth=(1,), window_size=2), torch.randn(2, 3, 16, 16)
    )
