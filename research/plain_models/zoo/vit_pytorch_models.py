"""Models of vit-pytorch."""

from importlib import import_module
from typing import Any

import torch

from research.plain_models.registry import Built, called, plain_model, simple

SMALL: dict[str, Any] = {"dim": 15, "heads": 3, "mlp_dim": 17}
PATCHES: dict[str, Any] = {"image_size": 12, "patch_size": 4, "num_classes": 5, "depth": 2, **SMALL}


def _of_image(module: str, name: str = "", size: int = 12, **options: Any) -> None:
    """Register the class `name` of `vit_pytorch.module`, called with an image."""

    def build() -> Built:
        model = getattr(import_module(f"vit_pytorch.{module}"), name)(**options)
        return simple(model, torch.randn(2, 3, size, size))

    plain_model("vit-pytorch", "vision", name=module)(build)


_of_image("vit", "ViT", **PATCHES, dim_head=7)
_of_image("simple_vit", "SimpleViT", **PATCHES | {"dim": 16})
_of_image("simple_flash_attn_vit", "SimpleViT", **PATCHES | {"dim": 16}, use_flash=True)
_of_image("simple_vit_with_register_tokens", "SimpleViT", **PATCHES | {"dim": 16})
_of_image("simple_vit_with_qk_norm", "SimpleViT", **PATCHES | {"dim": 16})
_of_image("simple_vit_with_value_residual", "SimpleViT", **PATCHES | {"dim": 16})
_of_image("normalized_vit", "nViT", **PATCHES, dim_head=7)
_of_image("deepvit", "DeepViT", **PATCHES, dim_head=7)
_of_image("cait", "CaiT", **PATCHES, dim_head=7, cls_depth=2)
_of_image("parallel_vit", "ViT", **PATCHES, dim_head=7)
_of_image("vit_for_small_dataset", "ViT", **PATCHES, dim_head=7)
_of_image("vit_with_patch_merger", "ViT", **PATCHES, dim_head=7, patch_merge_layer=1, patch_merge_num_tokens=4)
_of_image("learnable_memory_vit", "ViT", **PATCHES, dim_head=7)
_of_image("ats_vit", "ViT", **PATCHES, dim_head=7, max_tokens_per_depth=(7, 5))
_of_image("xcit", "XCiT", **PATCHES, dim_head=7, cls_depth=1)
_of_image("pit", "PiT", **PATCHES | {"depth": (1, 1), "heads": 3}, dim_head=7, size=12)
_of_image(
    "cct",
    "CCT",
    img_size=12,
    embedding_dim=15,
    n_conv_layers=1,
    kernel_size=3,
    num_layers=2,
    num_heads=3,
    mlp_ratio=2,
    num_classes=5,
)
_of_image(
    "cross_vit",
    "CrossViT",
    image_size=12,
    num_classes=5,
    sm_dim=15,
    lg_dim=21,
    sm_patch_size=3,
    sm_enc_heads=3,
    sm_enc_mlp_dim=17,
    sm_enc_dim_head=7,
    sm_enc_depth=1,
    lg_patch_size=6,
    lg_enc_depth=1,
    lg_enc_heads=2,
    lg_enc_dim_head=5,
    lg_enc_mlp_dim=17,
    cross_attn_depth=1,
    cross_attn_heads=3,
    cross_attn_dim_head=5,
    depth=1,
)
_of_image(
    "nest",
    "NesT",
    image_size=16,
    patch_size=2,
    dim=12,
    heads=3,
    num_hierarchies=2,
    block_repeats=(1, 1),
    num_classes=5,
    size=16,
)
_of_image(
    "levit", "LeViT", image_size=32, num_classes=5, stages=2, dim=(16, 24), depth=1, heads=(2, 3), mlp_mult=2, size=32
)
_of_image("max_vit", "MaxViT", num_classes=5, dim=8, depth=(1,), dim_head=4, window_size=2, size=16)
_of_image(
    "scalable_vit",
    "ScalableViT",
    num_classes=5,
    dim=8,
    heads=(2, 2),
    depth=(1, 1),
    ssa_dim_key=(4, 4),
    reduction_factor=(2, 1),
    window_size=(2, None),
    size=32,
)


@plain_model("vit-pytorch", "vision", name="vivit")
def vivit() -> Built:
    """Factorised attention over space, then time."""
    from vit_pytorch.vivit import ViViT

    options = {"frames": 6, "frame_patch_size": 2, "spatial_depth": 1, "temporal_depth": 1, "image_patch_size": 4}
    model = ViViT(image_size=12, num_classes=5, **options, **SMALL)
    return simple(model, torch.randn(2, 3, 6, 12, 12))


@plain_model("vit-pytorch", "vision", name="na_vit")
def na_vit() -> Built:
    """Images of different sizes, packed into one sequence."""
    from vit_pytorch.na_vit import NaViT

    images = [[torch.randn(3, 12, 12), torch.randn(3, 8, 12)], [torch.randn(3, 16, 8)]]
    unpadded = [[torch.randn(3, 12, 12), torch.randn(3, 8, 12)], [torch.randn(3, 12, 20)]]
    alone = [([each],) for each in images]
    model = NaViT(**PATCHES | {"image_size": 20})
    return Built(model, (called(unpadded), called(images, case="right padding", alone=alone)), cross=("attn_pool",))


@plain_model("vit-pytorch", "series", name="vit_1d")
def vit_1d() -> Built:
    """Patches of a series."""
    from vit_pytorch.vit_1d import ViT

    return simple(ViT(seq_len=28, patch_size=4, num_classes=5, depth=2, **SMALL), torch.randn(2, 3, 28))
