"""Attention of torch itself and of torchvision."""

import torch
from torch import nn

from research.plain_models.registry import Built, Case, called, plain_model, simple

LENGTHS = (11, 7)


def padded(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of two sequences of lengths 11 and 7 with features of this shape, and True at its padding."""
    x = torch.randn(2, 11, *shape)
    return x, torch.arange(11) >= torch.tensor(LENGTHS)[:, None]


@plain_model("torch", "language", name="TransformerEncoder")
def encoder() -> Built:
    """Encoder with padding on the right and on the left."""
    layer = nn.TransformerEncoderLayer(15, 3, 17, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, is_padding = padded(15)
    left, is_left = x.flip(1), is_padding.flip(1)
    return Built(
        model,
        (
            called(x),
            called(
                x,
                case="right padding",
                src_key_padding_mask=is_padding,
                alone=[(x[i : i + 1, :length],) for i, length in enumerate(LENGTHS)],
            ),
            called(
                left,
                case="left padding",
                src_key_padding_mask=is_left,
                alone=[(left[i : i + 1, 11 - length :],) for i, length in enumerate(LENGTHS)],
            ),
        ),
    )


@plain_model("torch", "language", name="TransformerEncoder, nested tensors")
def nested_encoder() -> Built:
    """Encoder whose fast path packs a padded batch."""
    layer = nn.TransformerEncoderLayer(12, 2, 17, batch_first=True)
    x, is_padding = padded(12)
    alone = [(x[i : i + 1, :length],) for i, length in enumerate(LENGTHS)]
    return Built(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=True),
        (called(x, case="right padding", src_key_padding_mask=is_padding, alone=alone),),
    )


@plain_model("torch", "language", name="TransformerDecoder")
def decoder() -> Built:
    """Decoder with a causal mask, and padding in its own tokens and in the memory."""
    layer = nn.TransformerDecoderLayer(15, 3, 17, batch_first=True)
    x, is_padding = padded(15)
    memory, is_memory_padding = torch.randn(2, 5, 15), torch.arange(5) >= torch.tensor([3, 5])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(11)

    def alone(i: int, length: int, memory_length: int) -> Case:
        mask = causal[:length, :length]
        return called(x[i : i + 1, :length], memory[i : i + 1, :memory_length], tgt_mask=mask)

    both = Case(
        "both padded",
        lambda model: model(
            x,
            memory,
            tgt_mask=causal,
            tgt_key_padding_mask=torch.where(is_padding, -torch.inf, 0.0),
            memory_key_padding_mask=is_memory_padding,
        ),
        (alone(0, 11, 3).call, alone(1, 7, 5).call),
    )
    return Built(nn.TransformerDecoder(layer, 2), (called(x, memory, tgt_mask=causal), both), cross=("multihead_attn",))


@plain_model("torch", "language", name="Transformer")
def transformer() -> Built:
    """Encoder and decoder, with the length first."""
    model = nn.Transformer(15, 3, 1, 1, 17)
    return Built(model, (called(torch.randn(11, 2, 15), torch.randn(7, 2, 15)),), cross=("multihead_attn",))


@plain_model("torch", "language", name="MultiheadAttention, added keys")
def added_keys() -> Built:
    """Attention with a learned key and a zero key after the tokens."""
    x = torch.randn(2, 7, 15)
    model = nn.MultiheadAttention(15, 3, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    return Built(model, (called(x, x, x, need_weights=False), called(x, x, x, case="weights")))


@plain_model("torch", "language", name="MultiheadAttention, unbatched")
def unbatched() -> Built:
    """Attention without a batch axis."""
    x = torch.randn(7, 15)
    return simple(nn.MultiheadAttention(15, 3), x, x, x, need_weights=False)


@plain_model("torch", "language", name="MultiheadAttention, other key and value widths")
def other_widths() -> Built:
    """Cross-attention to keys and values of other widths."""
    model = nn.MultiheadAttention(15, 3, kdim=13, vdim=17, batch_first=True)
    return Built(model, (called(torch.randn(2, 7, 15), torch.randn(2, 5, 13), torch.randn(2, 5, 17)),), cross=("",))


@plain_model("torchvision", "vision")
def vit() -> Built:
    """Vision transformer."""
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(12, 4, 2, 3, 15, 17, num_classes=5)
    nn.init.normal_(model.heads[-1].weight)
    return simple(model, torch.randn(2, 3, 12, 12))


@plain_model("torchvision", "vision")
def swin() -> Built:
    """Transformer with shifted windows."""
    from torchvision.models.swin_transformer import SwinTransformer

    return simple(SwinTransformer([2, 2], 12, [2], [3], [3, 3], num_classes=5), torch.randn(2, 3, 12, 12))


@plain_model("torchvision", "vision")
def swin_v2() -> Built:
    """Transformer with shifted windows and cosine attention."""
    from torchvision.models.swin_transformer import SwinTransformer, SwinTransformerBlockV2

    model = SwinTransformer([2, 2], 12, [2], [3], [3, 3], num_classes=5, block=SwinTransformerBlockV2)
    return simple(model, torch.randn(2, 3, 12, 12))


@plain_model("torchvision", "vision")
def maxvit() -> Built:
    """Attention within windows and grids."""
    from torchvision.models.maxvit import MaxVit

    model = MaxVit((16, 16), 8, 2, [8], [1], 4, 0.0, num_classes=5)
    return simple(model, torch.randn(2, 3, 16, 16))
