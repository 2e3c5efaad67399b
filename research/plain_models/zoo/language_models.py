"""Language models, most of them with attention of their own."""

import torch

from research.plain_models.registry import Built, Case, called, plain_model, simple
from research.plain_models.zoo.texts import TOKENS, padded_tokens, tokens


@plain_model("local-attention", "language")
def local_transformer() -> Built:
    """Attention within windows that look back."""
    from local_attention import LocalTransformer

    model = LocalTransformer(
        num_tokens=TOKENS, dim=18, depth=2, max_seq_len=32, local_attn_window_size=4, heads=3, dim_head=6, causal=True
    )
    return simple(model, tokens(12))


@plain_model("linformer", "language")
def linformer() -> Built:
    """Keys and values compressed along the sequence."""
    from linformer import LinformerLM

    return simple(LinformerLM(num_tokens=TOKENS, dim=18, seq_len=11, depth=2, heads=3, k=5), tokens())


@plain_model("performer-pytorch", "language")
def performer() -> Built:
    """Linear attention by random features, whose softmax kernel is no softmax."""
    from performer_pytorch import PerformerLM

    return simple(PerformerLM(num_tokens=TOKENS, max_seq_len=12, dim=18, depth=1, heads=3, dim_head=6), tokens(12))


@plain_model("reformer-pytorch", "language")
def reformer() -> Built:
    """Attention within buckets of hashed keys."""
    from reformer_pytorch import ReformerLM

    model = ReformerLM(
        num_tokens=TOKENS, dim=18, depth=1, max_seq_len=16, heads=3, bucket_size=4, n_hashes=2, causal=True
    )
    return simple(model, tokens(16))


@plain_model("routing-transformer", "language")
def routing() -> Built:
    """Attention within clusters."""
    from routing_transformer import RoutingTransformerLM

    model = RoutingTransformerLM(
        num_tokens=TOKENS, dim=18, heads=3, depth=1, max_seq_len=16, window_size=8, n_local_attn_heads=1, causal=True
    )
    return simple(model, tokens(16))


@plain_model("h-transformer-1d", "language")
def h_transformer() -> Built:
    """Hierarchical attention."""
    from h_transformer_1d import HTransformer1D

    model = HTransformer1D(
        num_tokens=TOKENS, dim=18, depth=1, causal=False, max_seq_len=16, heads=3, dim_head=6, block_size=4
    )
    return simple(model, tokens(16))


@plain_model("palm-rlhf-pytorch", "language")
def palm() -> Built:
    """Parallel blocks with one head of keys and values."""
    from palm_rlhf_pytorch import PaLM

    return simple(PaLM(num_tokens=TOKENS, dim=18, depth=2, heads=3, dim_head=6, flash_attn=False), tokens())


@plain_model("CoLT5-attention", "language")
def colt5() -> Built:
    """Local attention next to attention of routed tokens."""
    from colt5_attention import ConditionalRoutedAttention

    model = ConditionalRoutedAttention(
        dim=18,
        light_dim_head=6,
        light_heads=3,
        light_window_size=4,
        heavy_dim_head=6,
        heavy_heads=3,
        num_heavy_tokens_q=4,
        num_heavy_tokens_kv=5,
    )
    return simple(model, torch.randn(2, 12, 18))


@plain_model("memory-efficient-attention-pytorch", "language")
def memory_efficient() -> Built:
    """Attention computed in chunks when it is long, plain otherwise."""
    from memory_efficient_attention_pytorch import Attention

    return simple(Attention(dim=18, dim_head=6, heads=3, causal=True), torch.randn(2, 11, 18))


@plain_model("nystrom-attention", "language")
def nystrom() -> Built:
    """Three softmaxes and an inverse in place of the weights."""
    from nystrom_attention import Nystromformer

    return simple(
        Nystromformer(dim=18, dim_head=6, heads=3, depth=1, num_landmarks=4, pinv_iterations=2), torch.randn(2, 12, 18)
    )


@plain_model("native-sparse-attention-pytorch", "language")
def native_sparse() -> Built:
    """Compressed, selected and local keys."""
    from native_sparse_attention_pytorch import SparseAttention

    model = SparseAttention(
        dim=18,
        dim_head=6,
        heads=3,
        sliding_window_size=2,
        compress_block_size=4,
        compress_block_sliding_stride=2,
        selection_block_size=4,
        num_selected_blocks=2,
    )
    return simple(model, torch.randn(2, 12, 18))


@plain_model("compositional-attention-pytorch", "language")
def compositional() -> Built:
    """Search and retrieval as two softmaxes."""
    from compositional_attention_pytorch import CompositionalAttention

    return simple(CompositionalAttention(dim=18, dim_head=6, num_searches=3, num_retrievals=2), torch.randn(2, 11, 18))


@plain_model("agent-attention-pytorch", "language")
def agent() -> Built:
    """Attention through agent tokens."""
    from agent_attention_pytorch import AgentSelfAttention

    return simple(AgentSelfAttention(dim=18, num_agent_tokens=5, dim_head=6, heads=3), torch.randn(2, 11, 18))


@plain_model("grouped-query-attention-pytorch", "language")
def grouped() -> Built:
    """Grouped queries, by einsum."""
    from grouped_query_attention_pytorch.attention import MultiheadGQA

    x = torch.randn(2, 11, 32)
    return simple(MultiheadGQA(embed_dim=32, query_heads=4, kv_heads=2), x, x, x, is_causal=True)


@plain_model("torchscale", "language", name="encoder")
def torchscale_encoder() -> Built:
    """Encoder with and without padding."""
    from torchscale.architecture.config import EncoderConfig
    from torchscale.architecture.encoder import Encoder

    config = EncoderConfig(
        encoder_embed_dim=18,
        encoder_attention_heads=3,
        encoder_ffn_embed_dim=17,
        encoder_layers=2,
        vocab_size=TOKENS,
        subln=False,
        deepnorm=False,
    )
    x, mask, _ = padded_tokens()
    embeddings = torch.randn(2, 11, 18)
    alone = tuple(
        lambda model, i=i, length=length: model(token_embeddings=embeddings[i : i + 1, :length], src_tokens=None)
        for i, length in enumerate((11, 7))
    )
    del x
    return Built(
        Encoder(config),
        (
            called(src_tokens=None, token_embeddings=embeddings),
            Case(
                "right padding",
                lambda model: model(None, token_embeddings=embeddings, encoder_padding_mask=~mask),
                alone,
            ),
        ),
    )


@plain_model("torchscale", "language", name="norm before projection")
def torchscale_subln() -> Built:
    """Encoder that normalises the heads before the output projection."""
    from torchscale.architecture.config import EncoderConfig
    from torchscale.architecture.encoder import Encoder

    config = EncoderConfig(
        encoder_embed_dim=18, encoder_attention_heads=3, encoder_ffn_embed_dim=17, encoder_layers=2, vocab_size=TOKENS
    )
    return simple(Encoder(config), src_tokens=None, token_embeddings=torch.randn(2, 11, 18))


@plain_model("litgpt", "language")
def litgpt() -> Built:
    """GPT with grouped queries, called with the prompt and with a cache."""
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        block_size=32,
        n_layer=2,
        n_head=4,
        n_query_groups=2,
        n_embd=16,
        vocab_size=TOKENS,
        padded_vocab_size=TOKENS,
        intermediate_size=17,
        rotary_percentage=1.0,
    )
    ids = tokens(7)

    def cached(model: torch.nn.Module) -> torch.Tensor:
        model.set_kv_cache(batch_size=2, max_seq_length=16)
        try:
            model(ids[:, :5], torch.arange(5))
            return model(ids[:, 5:], torch.arange(5, 7))
        finally:
            model.clear_kv_cache()

    return Built(GPT(config), (called(ids), Case("preallocated cache", cached, (lambda model: model(ids),))))


@plain_model("fair-esm", "language", name="ESM-2")
def esm2() -> Built:
    """Protein model with rotary positions, with padding by token."""
    from esm.model.esm2 import ESM2

    model = ESM2(num_layers=2, embed_dim=18, attention_heads=3, alphabet="ESM-1b", token_dropout=False)
    ids = torch.randint(4, 24, (2, 11))
    short = ids.clone()
    short[1, 7:] = 1  # the padding token
    return Built(model, (called(ids), called(short, case="right padding", alone=[(ids[:1],), (ids[1:, :7],)])))


@plain_model("fair-esm", "language", name="MSA transformer")
def msa() -> Built:
    """Attention over the rows and the columns of aligned proteins."""
    from argparse import Namespace

    from esm.data import Alphabet
    from esm.model.msa_transformer import MSATransformer

    options = Namespace(
        layers=1,
        num_layers=1,
        embed_dim=18,
        logit_bias=True,
        ffn_embed_dim=17,
        attention_heads=3,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_tokens_per_msa=2**14,
        max_tokens=64,
        max_positions=64,
        embed_positions_msa=False,
        token_dropout=False,
    )
    return simple(
        MSATransformer(options, Alphabet.from_architecture("msa_transformer")), torch.randint(4, 24, (2, 3, 7))
    )


@plain_model("curated-transformers", "language", name="BERT")
def curated_bert() -> Built:
    """Encoder with a mask."""
    from curated_transformers.layers import AttentionMask
    from curated_transformers.models.bert import BERTConfig, BERTEncoder

    model = BERTEncoder(
        BERTConfig(
            embedding_width=18,
            hidden_width=18,
            intermediate_width=17,
            n_attention_heads=3,
            n_hidden_layers=2,
            n_pieces=TOKENS,
            model_max_length=32,
        )
    )
    ids, mask, _ = padded_tokens()

    def alone(i: int, length: int) -> Case:
        return called(ids[i : i + 1, :length], AttentionMask(torch.ones(1, length, dtype=torch.bool)))

    return Built(
        model,
        (
            called(ids, AttentionMask(torch.ones_like(mask))),
            Case("right padding", lambda model: model(ids, AttentionMask(mask)), (alone(0, 11).call, alone(1, 7).call)),
        ),
    )


@plain_model("speechbrain", "language", name="TransformerLM")
def speechbrain_lm() -> Built:
    """Language model on torch's encoder."""
    from speechbrain.lobes.models.transformer.TransformerLM import TransformerLM

    return simple(
        TransformerLM(TOKENS, d_model=18, nhead=3, num_encoder_layers=2, num_decoder_layers=0, d_ffn=17, causal=True),
        tokens(),
    )
