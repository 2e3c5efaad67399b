"""Tiny random pipelines of diffusers, by name: the transformer reads a text and the latents of a picture.

The picture is 16 pixels high and as wide as the caller states, and its latents have half of these sizes.
"""

import diffusers
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

WORDS = ["a", "red", "blue", "green", "circle", "square", "star", "left", "right", "of", "above", "below"]
TEXT = "a red circle left of a blue square"
LENGTH = 20
"""Number of tokens of the text of T5, with padding."""


def tokenizer(length, *, has_start):
    """Return a tokenizer of words."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", "<s>", *WORDS])}
    built = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if has_start else "$A </s>", special_tokens=[("<s>", 3), ("</s>", 1)]
    )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, model_max_length=length, bos_token="<s>" if has_start else None, **special
    )


def t5(width):
    """Return the text encoder T5."""
    config = transformers.T5Config(vocab_size=32, d_model=width, d_kv=8, d_ff=20, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config).eval()


def clip(width, kind=transformers.CLIPTextModelWithProjection):
    """Return the text encoder of CLIP, whose texts have 12 tokens."""
    config = transformers.CLIPTextConfig(
        vocab_size=32, hidden_size=width, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=12, projection_dim=width, bos_token_id=3, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return kind(config).eval()


def decoder():
    """Return the autoencoder that decodes latents of four channels, scaled and shifted, to a picture of twice their
    width and height.
    """
    return diffusers.AutoencoderKL(
        latent_channels=4, block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, sample_size=16, shift_factor=0.1,
        scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False,
    ).eval()  # fmt: skip


HEADS = {"num_attention_heads": 3, "attention_head_dim": 8}


def pixart():
    """Return a pipeline in which the picture attends to a padded text."""
    model = diffusers.PixArtTransformer2DModel(
        **HEADS, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=24, caption_channels=16,
        sample_size=8, norm_num_groups=4, use_additional_conditions=False,
    )  # fmt: skip
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return diffusers.PixArtAlphaPipeline(tokenizer(LENGTH, has_start=False), t5(16), decoder(), model, scheduler)


def sd3():
    """Return a pipeline with joint attention over the picture and the texts of CLIP and T5."""
    model = diffusers.SD3Transformer2DModel(
        **HEADS, sample_size=16, in_channels=4, out_channels=4, num_layers=2, joint_attention_dim=26,
        caption_projection_dim=24, pooled_projection_dim=24, pos_embed_max_size=16,
    )  # fmt: skip
    of_clip = clip(12), tokenizer(12, has_start=True)
    return diffusers.StableDiffusion3Pipeline(
        model, diffusers.FlowMatchEulerDiscreteScheduler(), decoder(), *of_clip, *of_clip, t5(26),
        tokenizer(LENGTH, has_start=False),
    )  # fmt: skip


def flux():
    """Return a pipeline with joint attention over a text and latents that are packed in blocks of 2 x 2."""
    model = diffusers.FluxTransformer2DModel(
        **HEADS, in_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=16, pooled_projection_dim=12,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    return diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), decoder(), clip(12, transformers.CLIPTextModel),
        tokenizer(12, has_start=True), t5(16), tokenizer(LENGTH, has_start=False), model,
    )  # fmt: skip


PIPELINES = {"PixArt": pixart, "Stable Diffusion 3": sd3, "Flux": flux}
OPTIONS = {"PixArt": {"use_resolution_binning": False, "clean_caption": False}}


def pipeline(name):
    """Return a pipeline with random weights, and the options with which it is called."""
    torch.manual_seed(0)
    built = PIPELINES[name]()
    for parameter in built.transformer.eval().parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)  # larger scores would differ by their rounding
    built.set_progress_bar_config(disable=True)
    options = {"height": 16, "num_inference_steps": 3, "max_sequence_length": LENGTH} | OPTIONS.get(name, {})
    return built, options
