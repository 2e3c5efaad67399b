"""Models of pictures and texts, and models that attend to latents."""

import torch

from research.plain_models.registry import Built, called, plain_model, simple


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


@plain_model("q-transformer", "multimodal")
def q_transformer() -> Built:
    """Self-attention and cross-attention, both with learned keys in front."""
    from q_transformer.q_robotic_transformer import Transformer

    model = Transformer(dim=18, heads=3, dim_head=6, depth=2, causal=True, cross_attend=True)
    call = called(torch.randn(2, 7, 18), context=torch.randn(2, 5, 18))
    return Built(model, (call,), cross=("layers.0.1", "layers.1.1"))
