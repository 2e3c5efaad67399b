"""Language models that read a text in parts, with a memory."""

import torch

from research.plain_models.registry import Built, called, plain_model, simple
from research.plain_models.zoo.texts import TOKENS, tokens


@plain_model("recurrent-memory-transformer-pytorch", "language")
def recurrent_memory() -> Built:
    """Memories read and written before and after the text."""
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    model = RecurrentMemoryTransformer(
        num_tokens=TOKENS, dim=18, depth=2, num_memory_tokens=3, seq_len=11, heads=3, dim_head=6, causal=True
    )
    return simple(model, tokens())


@plain_model("block-recurrent-transformer-pytorch", "language")
def block_recurrent() -> Built:
    """Attention to blocks and to recurrent states, which differ between sequences from the start: the study takes rows
    that share their keys for one sequence.
    """
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    model = BlockRecurrentTransformer(
        num_tokens=TOKENS,
        dim=18,
        depth=2,
        dim_head=6,
        heads=3,
        max_seq_len=16,
        block_width=4,
        num_state_vectors=4,
        recurrent_layers=(2,),
        use_flash_attn=False,
    )
    call = called(tokens(16), states=[torch.randn(2, 4, 18)])
    return Built(model, (call,), cross=("to_state_cross_attn", "from_state_cross_attn"))


@plain_model("hourglass-transformer-pytorch", "language")
def hourglass() -> Built:
    """Shortened sequences."""
    from hourglass_transformer_pytorch import HourglassTransformerLM

    model = HourglassTransformerLM(
        num_tokens=TOKENS, dim=18, max_seq_len=12, shorten_factor=2, depth=(1, 1, 1), heads=3, dim_head=6
    )
    return simple(model, tokens(12))


@plain_model("feedback-transformer-pytorch", "language")
def feedback() -> Built:
    """One token at a time, attending to memories."""
    from feedback_transformer_pytorch import FeedbackTransformer

    model = FeedbackTransformer(num_tokens=TOKENS, dim=18, depth=2, seq_len=3, mem_len=5, dim_head=6, heads=3)
    return simple(model, tokens(6))


@plain_model("compressive-transformer-pytorch", "language")
def compressive() -> Built:
    """Memory and compressed memory before the text."""
    from compressive_transformer_pytorch import CompressiveTransformer

    model = CompressiveTransformer(
        num_tokens=TOKENS,
        emb_dim=18,
        dim=18,
        heads=3,
        depth=2,
        seq_len=8,
        mem_len=8,
        cmem_len=2,
        cmem_ratio=4,
        memory_layers=[2],
    )
    return simple(model, tokens(8))


@plain_model("infini-transformer-pytorch", "language")
def infini() -> Built:
    """Attention with a compressed memory."""
    from infini_transformer_pytorch import InfiniTransformer

    return simple(InfiniTransformer(num_tokens=TOKENS, dim=18, depth=2, heads=3, dim_head=6), tokens())


@plain_model("memorizing-transformers-pytorch", "language", name="two segments")
def memorizing() -> Built:
    """A segment that attends to keys and values of the segment before."""
    from memorizing_transformers_pytorch.memorizing_transformers_pytorch import Attention

    class Segments(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(dim=18, heads=3, dim_head=6, xl_max_memories=5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, memory = self.attention(x[:, :5])
            second, _ = self.attention(x[:, 5:], xl_memory=memory)
            return torch.cat([first, second], 1)

    return simple(Segments(), torch.randn(2, 10, 18))
