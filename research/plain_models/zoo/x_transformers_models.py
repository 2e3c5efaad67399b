"""Options of the library x-transformers."""

import torch

from research.plain_models.registry import Built, Case, called, plain_model, simple
from research.plain_models.zoo.texts import TOKENS, padded_tokens, tokens


def _x_transformers(name: str, *, causal: bool = True, **options: object) -> None:
    """Register a decoder or an encoder of x-transformers with these options, called with and without padding."""

    def build() -> Built:
        from x_transformers import Decoder, Encoder, TransformerWrapper

        layers = (Decoder if causal else Encoder)(dim=18, depth=2, heads=3, attn_dim_head=6, **options)
        model = TransformerWrapper(num_tokens=TOKENS, max_seq_len=32, attn_layers=layers)
        ids, mask, alone = padded_tokens()
        return Built(model, (called(ids), called(ids, case="right padding", mask=mask, alone=alone)))

    plain_model("x-transformers", "language", name=name)(build)


_x_transformers("decoder")
_x_transformers("encoder", causal=False)
_x_transformers("decoder, flash", attn_flash=True)
_x_transformers("encoder, flash", causal=False, attn_flash=True)
_x_transformers("decoder, rotary", rotary_pos_emb=True)
_x_transformers("decoder, alibi", alibi_pos_bias=True)
_x_transformers("decoder, T5 bias", rel_pos_bias=True)
_x_transformers("decoder, grouped queries", attn_kv_heads=1)
_x_transformers("decoder, memory keys", attn_num_mem_kv=2)
_x_transformers("decoder, pre talking heads", attn_pre_talking_heads=True)
_x_transformers("decoder, gated values", attn_gate_values=True)
_x_transformers("decoder, head scale", attn_head_scale=True)
_x_transformers("decoder, query-key norm", attn_qk_norm=True)
_x_transformers("decoder, attention on attention", attn_on_attn=True)
_x_transformers("decoder, one value head", attn_one_kv_head=True)
_x_transformers("decoder, sandwich norm", sandwich_norm=True)
_x_transformers("decoder, shifted tokens", shift_tokens=1)
_x_transformers("decoder, sparse top-k", attn_sparse_topk=3)
_x_transformers("decoder, learned sink", attn_head_learned_sink=True)
_x_transformers("decoder, zero key", attn_add_zero_kv=True)
_x_transformers("decoder, gate of outputs", attn_output_gate=True)
_x_transformers("decoder, selective", attn_selective=True)
_x_transformers("decoder, latent keys", attn_use_latent_kv=True, attn_dim_latent_kv=7)
_x_transformers("decoder, bias of data", attn_data_dependent_alibi=True)
_x_transformers("decoder, contextual positions", attn_use_cope=True)
_x_transformers("decoder, residual scores", residual_attn=True)
_x_transformers("decoder, residual values", add_value_residual=True)
_x_transformers("decoder, past window", attn_max_attend_past=3)
_x_transformers("decoder, hard", attn_hard=True)
_x_transformers("decoder, post talking heads", attn_post_talking_heads=True)


@plain_model("x-transformers", "language", name="memory tokens")
def x_memory_tokens() -> Built:
    """Encoder with memory tokens before the text."""
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=18, depth=2, heads=3, attn_dim_head=6)
    model = TransformerWrapper(num_tokens=TOKENS, max_seq_len=32, num_memory_tokens=3, attn_layers=layers)
    return simple(model, tokens())


@plain_model("x-transformers", "language", name="encoder-decoder")
def x_encoder_decoder() -> Built:
    """Encoder and decoder with cross-attention."""
    from x_transformers import XTransformer

    options = {
        f"{side}_{name}": value
        for side in ("enc", "dec")
        for name, value in {"num_tokens": TOKENS, "depth": 1, "heads": 3, "max_seq_len": 32, "attn_dim_head": 6}.items()
    }
    model = XTransformer(dim=18, **options)
    source, mask, alone = padded_tokens()
    target = tokens(5)
    cases = (
        called(source, target),
        Case(
            "right padding",
            lambda model: model(source, target, mask=mask),
            tuple(lambda model, i=i: model(alone[i][0], target[i : i + 1]) for i in range(2)),
        ),
    )
    return Built(model, cases, cross=("layers.1.1",))


@plain_model("x-transformers", "vision", name="vit")
def x_vit() -> Built:
    """Vision transformer."""
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=18, depth=2, heads=3, attn_dim_head=6)
    return simple(
        ViTransformerWrapper(image_size=12, patch_size=4, num_classes=5, attn_layers=layers), torch.randn(2, 3, 12, 12)
    )


@plain_model("x-transformers", "series", name="continuous")
def x_continuous() -> Built:
    """Transformer of vectors."""
    from x_transformers import ContinuousTransformerWrapper, Encoder

    layers = Encoder(dim=18, depth=2, heads=3, attn_dim_head=6)
    model = ContinuousTransformerWrapper(dim_in=5, dim_out=7, max_seq_len=32, attn_layers=layers)
    return simple(model, torch.randn(2, 11, 5))
