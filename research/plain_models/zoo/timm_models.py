"""Vision models of timm."""

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
_timm("vit_dlittle_patch16_reg1_gap_256", **VIT | {"embed_dim": 24})
_timm("vit_small_patch16_rope_mixed_224", **VIT | {"embed_dim": 24})


@plain_model("timm", "vision", name="attention pooling")
def timm_pool() -> Built:
    """Learned query that attends to all patches."""
    from timm.layers import AttentionPoolLatent

    model = AttentionPoolLatent(18, num_heads=3, latent_len=2)
    return Built(model, simple(model, torch.randn(2, 11, 18)).cases, cross=("",))
