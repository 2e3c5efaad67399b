"""Vision models."""

import torch

from research.plain_models.registry import Built, plain_model, simple


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
