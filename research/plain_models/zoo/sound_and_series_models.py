"""Models of sound, time series and tables."""

import torch

from research.plain_models.registry import Built, Case, called, plain_model, simple


@plain_model("openai-whisper", "audio")
def whisper() -> Built:
    """Encoder and decoder, with and without the fused function, and with the library's cache."""
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(8, 7, 18, 3, 2, 29, 11, 18, 3, 2))
    mel, ids = torch.randn(2, 8, 14), torch.randint(0, 29, (2, 5))

    def cached(model: Whisper) -> torch.Tensor:
        cache, hooks = model.install_kv_cache_hooks()
        try:
            features = model.embed_audio(mel)
            model.decoder(ids[:, :3], features, kv_cache=cache)
            for index in (3, 4):  # the mask of the library fits one new token at a time
                out = model.decoder(ids[:, index : index + 1], features, kv_cache=cache)
            return out
        finally:
            for hook in hooks:
                hook.remove()

    return Built(
        model, (called(mel, ids), Case("cache", cached, (lambda model: model(mel, ids),))), cross=("cross_attn",)
    )


@plain_model("openai-whisper", "audio", name="without the fused function")
def whisper_weights() -> Built:
    """Softmax and product in the module itself."""
    from whisper.model import ModelDimensions, Whisper, disable_sdpa

    model = Whisper(ModelDimensions(8, 7, 18, 3, 2, 29, 11, 18, 3, 2))
    mel, ids = torch.randn(2, 8, 14), torch.randint(0, 29, (2, 5))

    def call(model: Whisper) -> torch.Tensor:
        with disable_sdpa():
            return model(mel, ids)

    return Built(model, (Case("plain", call),), cross=("cross_attn",))


@plain_model("conformer", "audio")
def conformer() -> Built:
    """Attention with relative positions and convolutions."""
    from conformer import Conformer

    return simple(Conformer(18, depth=2, dim_head=6, heads=3, conv_kernel_size=3), torch.randn(2, 11, 18))


@plain_model("conformer", "audio", name="padded block")
def conformer_padded() -> Built:
    """One attention module with a mask."""
    from conformer.conformer import Attention

    x, mask = torch.randn(2, 11, 18), torch.arange(11) < torch.tensor([[11], [7]])
    return Built(
        Attention(18, heads=3, dim_head=6),
        (called(x), called(x, case="right padding", mask=mask, alone=[(x[:1],), (x[1:, :7],)])),
    )


@plain_model("BS-RoFormer", "audio", name="BS-RoFormer")
def bs_roformer() -> Built:
    """Attention over time and over bands of frequencies."""
    from bs_roformer import BSRoformer

    model = BSRoformer(
        dim=18,
        depth=1,
        time_transformer_depth=1,
        freq_transformer_depth=1,
        heads=3,
        dim_head=6,
        stft_n_fft=32,
        stft_win_length=32,
        stft_hop_length=8,
        freqs_per_bands=(2, 4, 5, 6),
        flash_attn=False,
    )
    return simple(model, torch.randn(2, 64))


@plain_model("speechbrain", "audio", name="Conformer")
def speechbrain_conformer() -> Built:
    """Relative positions, with padding. Its convolutions have a width of 1: wider ones read padding, so that tokens
    next to padding are others than without it.
    """
    from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
    from speechbrain.nnet.attention import RelPosEncXL

    model = ConformerEncoder(num_layers=2, d_model=18, d_ffn=17, nhead=3, kernel_size=1)
    x, is_padding = torch.randn(2, 11, 18), torch.arange(11) >= torch.tensor([[11], [7]])
    positions = RelPosEncXL(18)
    with torch.no_grad():
        whole, part = positions(x), positions(x[:, :7])

    def call(x: torch.Tensor, at: torch.Tensor, **options: torch.Tensor) -> Case:
        return called(x, pos_embs=at, **options)

    padded = Case(
        "right padding",
        call(x, whole, src_key_padding_mask=is_padding).call,
        (call(x[:1], whole).call, call(x[1:, :7], part).call),
    )
    return Built(model, (call(x, whole), padded))


@plain_model("speechbrain", "audio", name="Branchformer")
def branchformer() -> Built:
    """Attention next to a gated convolution."""
    from speechbrain.lobes.models.transformer.Branchformer import BranchformerEncoder

    return simple(
        BranchformerEncoder(
            num_layers=2, d_model=18, nhead=3, kernel_size=3, attention_type="regularMHA", csgu_linear_units=18
        ),
        torch.randn(2, 11, 18),
    )


@plain_model("iTransformer", "series")
def itransformer() -> Built:
    """Attention between series."""
    from iTransformer import iTransformer

    model = iTransformer(
        num_variates=5,
        lookback_len=16,
        depth=2,
        dim=18,
        dim_head=6,
        heads=3,
        pred_length=4,
        num_tokens_per_variate=1,
        flash_attn=False,
    )
    return simple(model, torch.randn(2, 16, 5))


@plain_model("iTransformer", "series", name="iTransformer2D")
def itransformer_2d() -> Built:
    """Attention along time and between series."""
    from iTransformer import iTransformer2D

    model = iTransformer2D(
        num_variates=5, num_time_tokens=4, lookback_len=16, depth=1, dim=18, dim_head=6, heads=3, pred_length=4
    )
    return simple(model, torch.randn(2, 16, 5))


@plain_model("rtdl-revisiting-models", "tables", name="FT-Transformer")
def ft_transformer() -> Built:
    """Attention between the columns of a table."""
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=5,
        cat_cardinalities=[3],
        d_out=2,
        n_blocks=2,
        d_block=18,
        attention_n_heads=3,
        attention_dropout=0.0,
        ffn_d_hidden_multiplier=1.5,
        ffn_dropout=0.0,
        residual_dropout=0.0,
    )
    return simple(model, torch.randn(2, 5), torch.tensor([[0], [2]]))


@plain_model("tab-transformer-pytorch", "tables", name="TabTransformer")
def tab_transformer() -> Built:
    """Attention between categories."""
    from tab_transformer_pytorch import TabTransformer

    sizes = {"dim": 18, "dim_out": 1, "depth": 2, "heads": 3, "dim_head": 6}
    model = TabTransformer(categories=(5, 7, 3), num_continuous=4, mlp_act=torch.nn.ReLU(), **sizes)
    return simple(model, torch.randint(0, 3, (2, 3)), torch.randn(2, 4))


@plain_model("tab-transformer-pytorch", "tables", name="FTTransformer")
def tab_ft_transformer() -> Built:
    """Attention between categories and numbers."""
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(categories=(5, 7, 3), num_continuous=4, dim=18, dim_out=1, depth=2, heads=3, dim_head=6)
    return simple(model, torch.randint(0, 3, (2, 3)), torch.randn(2, 4))


@plain_model("tft-torch", "series", name="interpretable attention")
def tft() -> Built:
    """Heads that share the values, averaged before the projection."""
    from tft_torch.tft import InterpretableMultiHeadAttention

    model = InterpretableMultiHeadAttention(embed_dim=18, num_heads=3)
    x = torch.randn(2, 11, 18)
    return simple(model, x, x, x, torch.ones(11, 11, dtype=torch.bool).triu(1))


@plain_model("chronos-forecasting", "series", name="Chronos-2")
def chronos2() -> Built:
    """Attention along time and between series of a group."""
    from chronos.chronos2 import Chronos2CoreConfig
    from chronos.chronos2.layers import TimeSelfAttention

    config = Chronos2CoreConfig(d_model=18, d_kv=6, num_heads=3, d_ff=17, num_layers=1, attn_implementation="eager")
    model = TimeSelfAttention(config)
    return simple(
        model, torch.randn(2, 11, 18), attention_mask=torch.zeros(2, 1, 1, 11), position_ids=torch.arange(11)[None]
    )


@plain_model("tabicl", "tables", name="column embedding")
def tabicl() -> Built:
    """Induced points."""
    from tabicl._model.encoders import SetTransformer

    return simple(
        SetTransformer(num_blocks=1, d_model=18, nhead=3, dim_feedforward=17, num_inds=5), torch.randn(2, 11, 18)
    )


@plain_model("isab-pytorch", "tables")
def isab() -> Built:
    """Induced points attend to a set, and the set to them."""
    from isab_pytorch import ISAB

    return simple(ISAB(dim=18, heads=3, num_latents=5), torch.randn(2, 11, 18))


@plain_model("voicebox-pytorch", "audio", name="transformer")
def voicebox() -> Built:
    """Fused attention, with and without padding."""
    from voicebox_pytorch.voicebox_pytorch import Transformer

    model = Transformer(dim=18, depth=2, heads=3, dim_head=6, attn_flash=True)
    x, mask = torch.randn(2, 11, 18), torch.arange(11) < torch.tensor([[11], [7]])
    return Built(model, (called(x), called(x, mask=mask, case="right padding", alone=[(x[:1],), (x[1:, :7],)])))


@plain_model("soundstorm-pytorch", "audio", name="Conformer")
def soundstorm() -> Built:
    """Attention between convolutions."""
    from soundstorm_pytorch.soundstorm import Conformer

    return simple(Conformer(dim=18, depth=1, heads=3, dim_head=6, attn_flash=False), torch.randn(2, 11, 18))
