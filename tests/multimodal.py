"""Tiny random models of transformers that read pictures or sound, each with a processor, prompts and pictures.

`NAMES` lists the models and `case` builds one of them. A new model is one entry of `ENTRIES`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import models, pre_tokenizers, processors

import tiny

SIZES = ((60, 60), (90, 45), (50, 110))
"""Width and height of the pictures."""


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture of random colours in blocks of 5x5 pixels, which resizing does not average out."""
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 5), -(-width // 5), 3), dtype=np.uint8)
    return Image.fromarray(blocks.repeat(5, 0).repeat(5, 1)[:height, :width])


def sound(samples: int, seed: int = 0) -> np.ndarray:
    """Return a sound of 16,000 samples per second: a tone of a random pitch, and noise."""
    generator = np.random.default_rng(seed)
    tone = np.sin(np.arange(samples) * generator.uniform(0.05, 0.5))
    return (tone + 0.1 * generator.standard_normal(samples)).astype(np.float32)


def series(length: int, seed: int = 0) -> torch.Tensor:
    """Return three random walks of a length, as columns."""
    return torch.randn(length, 3, generator=torch.Generator().manual_seed(seed)).cumsum(0)


@dataclass(frozen=True)
class Entry:
    """Functions that build a model and its processor, and the form of its prompts.

    Attributes:
        processor: returns the processor.
        model: returns the model for a processor.
        placeholder: text that stands for one picture in a prompt; None if the model reads no text.
        several: whether a prompt may have more than one picture.
        generates: whether the model has `generate`.
        sizes: width and height of the pictures; length of a sound or a series.
        create: function of a size and a seed that returns a picture, a sound or a series.
        read: function of processor, text and pictures that returns the model's inputs.
    """

    processor: Callable[[], Any]
    model: Callable[[Any], torch.nn.Module]
    placeholder: str | None
    several: bool = False
    generates: bool = True
    sizes: tuple = SIZES
    create: Callable = picture
    read: Callable = lambda processor, text, pictures: processor(text=text, images=pictures, return_tensors="pt")


@dataclass(frozen=True)
class Case:
    """A model in evaluation mode, its processor, and its prompts.

    Attributes:
        name: name in `NAMES`.
        model: the model.
        processor: processor of the model.
        entry: the model's entry in `ENTRIES`.
    """

    name: str
    model: torch.nn.Module
    processor: Any
    entry: Entry

    @property
    def several(self) -> bool:
        """True if a prompt may have more than one picture."""
        return self.entry.several

    @property
    def generates(self) -> bool:
        """True if the model has `generate`."""
        return self.entry.generates

    @property
    def sizes(self) -> tuple:
        """Width and height of the pictures to test."""
        return self.entry.sizes

    def prompt(self, pictures: int) -> str | None:
        """Return a prompt with this number of pictures, each before three words; None if the model reads no text."""
        if self.entry.placeholder is None:
            return None
        words = [" ".join(tiny.WORDS[start : start + 3]) for start in range(0, 3 * pictures, 3)]
        return " ".join(self.entry.placeholder + three for three in words) or " ".join(tiny.WORDS[:3])

    def picture(self, size: tuple, seed: int = 0):
        """Return a random picture of a size; a sound or a series if the model reads these."""
        return self.entry.create(*size, seed)

    def inputs(self, *pictures):
        """Return the model's inputs for a prompt with these pictures."""
        return self.entry.read(self.processor, self.prompt(len(pictures)), list(pictures))


def case(name: str) -> Case:
    """Return the model of this name with its processor; its weights are the same in each call."""
    entry = ENTRIES[name]
    processor = entry.processor()
    torch.manual_seed(0)
    return Case(name, tiny.with_distinct_heads(entry.model(processor)), processor, entry)


# -- parts of processors ----------------------------------------------------------------------------------------------


def tokenizer(template: str = "$A", **special: str):
    """Return a tokenizer of the words of `tiny`, of line breaks, and of special tokens by name of their attribute. The
    template shows where [CLS] and [END] stand around a text.
    """
    vocabulary = tiny.SPECIAL | {word: number for number, word in enumerate([*tiny.WORDS, "\n", "\n\n"], 5)}
    words = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    breaks = pre_tokenizers.Split(tokenizers.Regex("\n\n?"), "isolated")
    words.pre_tokenizer = pre_tokenizers.Sequence([breaks, pre_tokenizers.Split(" ", "removed")])
    words.post_processor = processors.TemplateProcessing(template, None, [("[CLS]", 2), ("[END]", 4)])
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "[CLS]", "eos_token": "[END]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names, extra_special_tokens=special)


def pictures_of(family: str, **options):
    """Return the image processor of a family that needs no torchvision."""
    folder = f"transformers.models.{family}"
    module = importlib.import_module(f"{folder}.image_processing_pil_{family}")
    return getattr(module, next(name for name in module.__all__ if name.endswith("Pil")))(**options)


def square(side: int) -> dict:
    """Return options of an image processor that resizes each picture to a square, whatever its shape."""
    return {"size": {"height": side, "width": side}}


def cropped(side: int) -> dict:
    """Return options of an image processor that resizes the shorter edge of a picture, and crops the longer one."""
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}


def without_video(processor_class: type):
    """Return the processor class without its video processor, which needs torchvision."""
    attributes = [name for name in processor_class.get_attributes() if name != "video_processor"]
    return type(processor_class.__name__, (processor_class,), {"get_attributes": classmethod(lambda cls: attributes)})


# -- parts of models --------------------------------------------------------------------------------------------------


def text(processor, **options) -> dict:
    """Return the sizes of a language model for the tokenizer of a processor: 6 heads, 2 of keys and values. An option
    of None removes a size that the family does not have.
    """
    sizes = {"vocab_size": len(processor.tokenizer), "hidden_size": 48, "intermediate_size": 37}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 4}
    return without_none(sizes | {"max_position_embeddings": 512} | ids | options)


def vision(**options) -> dict:
    """Return the sizes of a vision model: 3 heads of dimension 11, 7x7 patches."""
    sizes = {"hidden_size": 33, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 3}
    return without_none(sizes | {"image_size": 56, "patch_size": 8} | options)


def without_none(options: dict) -> dict:
    """Return the options whose value is not None."""
    return {name: value for name, value in options.items() if value is not None}


def encoder_and_decoder(processor) -> dict:
    """Return the sizes of a model with an encoder and a decoder, as BART names them: 6 heads each."""
    sides = ("encoder", "decoder")
    sizes = {"vocab_size": len(processor.tokenizer), "d_model": 48} | {f"{side}_layers": 2 for side in sides}
    sizes |= {f"{side}_attention_heads": 6 for side in sides} | {f"{side}_ffn_dim": 37 for side in sides}
    return sizes | {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 4, "decoder_start_token_id": 2}


def token_id(processor, token: str) -> int:
    """Return the id of a special token."""
    return processor.tokenizer.convert_tokens_to_ids(token)


def qwen(family: str, section: list[int], vision_sizes: dict, **options):
    """Return a function that builds a model of the Qwen-VL families for a processor. The section divides the pairs of
    rotated channels between time, row and column.
    """

    def build(processor):
        rotary = {"rope_type": "default", "mrope_section": section, "rope_theta": 1e4}
        config = getattr(transformers, f"{family}Config")(
            text_config=text(processor, rope_parameters=rotary, **options),
            vision_config={"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision_sizes},
            image_token_id=token_id(processor, "<|image_pad|>"),
            video_token_id=token_id(processor, "<|video_pad|>"),
            vision_start_token_id=token_id(processor, "<|vision_start|>"),
            vision_end_token_id=token_id(processor, "<|vision_end|>"),
        )
        return getattr(transformers, f"{family}ForConditionalGeneration")(config)

    return build


def florence(processor):
    """Return Florence-2, whose image encoder has two stages of windows and channels."""
    stages = {"depths": (1, 1), "patch_size": (7, 3), "patch_stride": (4, 2), "patch_padding": (3, 1)}
    stages |= {"patch_prenorm": (False, True), "embed_dim": (12, 36), "num_heads": (2, 3), "num_groups": (2, 3)}
    config = transformers.Florence2Config(
        text_config=transformers.BartConfig(**encoder_and_decoder(processor), forced_eos_token_id=None),
        vision_config={**stages, "window_size": 3, "projection_dim": 48},
        image_token_id=token_id(processor, "<image>"),
    )
    return transformers.Florence2ForConditionalGeneration(config)


def mllama(processor):
    """Return Llama 3.2 Vision, with open gates: the cross-attention of a new model has no effect."""
    sizes = vision(image_size=24, num_attention_heads=None, attention_heads=3, num_global_layers=1)
    sizes |= {"intermediate_layers_indices": [0], "vision_output_dim": 66}
    rotary = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.MllamaConfig(
        text_config=text(processor, cross_attention_layers=[1], rope_parameters=rotary),
        vision_config=sizes,
        image_token_index=token_id(processor, "<|image|>"),
    )
    model = transformers.MllamaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "gate" in name.rpartition(".")[2]:
            torch.nn.init.constant_(parameter, 0.7)
    return model


def query_tokens(family: str):
    """Return a function that builds BLIP-2 or InstructBLIP for a processor."""

    def build(processor):
        renamed = {"intermediate_size": None, "num_key_value_heads": None, "ffn_dim": 37, "word_embed_proj_dim": 48}
        sizes = text(processor, **renamed)
        queries = {"vocab_size": 107, "hidden_size": 30, "intermediate_size": 23, "num_attention_heads": 3}
        config = getattr(transformers, f"{family}Config")(
            text_config=transformers.OPTConfig(**sizes),
            vision_config=vision(),
            qformer_config=queries | {"num_hidden_layers": 2, "cross_attention_frequency": 1},
            num_query_tokens=processor.num_query_tokens,
            image_token_index=token_id(processor, "<image>"),
        )
        return getattr(transformers, f"{family}ForConditionalGeneration")(config)

    return build


def split_pictures(family: str, scale: int):
    """Return a function that builds Idefics3 or SmolVLM for a processor."""

    def build(processor):
        config = getattr(transformers, f"{family}Config")(
            text_config=transformers.LlamaConfig(**text(processor, head_dim=10)),
            vision_config=vision(image_size=48),
            image_token_id=token_id(processor, "<image>"),
            scale_factor=scale,
        )
        return getattr(transformers, f"{family}ForConditionalGeneration")(config)

    return build


def split_parts(family: str) -> tuple:
    """Return the image processor and the tokenizer of Idefics3 or SmolVLM: up to 2x2 tiles of 48x48 pixels."""
    rows = {f"tile_{row}_{column}": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)}
    special = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"}
    special |= {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    images = pictures_of(family, size={"longest_edge": 96}, max_image_size={"longest_edge": 48})
    return images, tokenizer("[CLS] $A", **special, **rows)


def smolvlm_processor():
    """Return the processor of SmolVLM, which needs the package num2words for the number of frames of a video alone."""
    module = importlib.import_module(transformers.SmolVLMProcessor.__module__)
    with mock.patch.object(module, "num2words", str):
        return without_video(transformers.SmolVLMProcessor)(*split_parts("smolvlm"), None, image_seq_len=4)


def qwen_processor(processor_class: type):
    """Return the processor of a Qwen-VL family, which merges 2x2 patches of 8x8 pixels to a token."""
    names = ("vision_start", "image_pad", "video_pad", "vision_end")
    images = pictures_of("qwen2_vl", patch_size=8, size={"shortest_edge": 16**2, "longest_edge": 5200})
    words = tokenizer(**{name: f"<|{name}|>" for name in names})
    return without_video(processor_class)(images, words)


# -- the models -------------------------------------------------------------------------------------------------------

ENTRIES = {
    "LLaVA": Entry(
        lambda: transformers.LlavaProcessor(
            pictures_of("clip", **cropped(56)),
            tokenizer("[CLS] $A", image_token="<image>"),
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        lambda processor: transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                text_config=transformers.LlamaConfig(**text(processor, head_dim=10)),
                vision_config=transformers.CLIPVisionConfig(**vision()),
                image_token_index=token_id(processor, "<image>"),
            )
        ),
        placeholder="<image>\n",
        several=True,
    ),
    "Qwen2-VL": Entry(
        lambda: qwen_processor(transformers.Qwen2VLProcessor),
        qwen("Qwen2VL", [1, 1, 2], {"depth": 2, "embed_dim": 36, "hidden_size": 48, "num_heads": 3}),
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        several=True,
    ),
    "LLaVA-NeXT": Entry(
        lambda: transformers.LlavaNextProcessor(
            pictures_of(
                "llava_next",
                **cropped(24),
                image_grid_pinpoints=[[24, 48], [48, 24], [48, 48], [24, 72], [72, 24]],
            ),
            tokenizer("[CLS] $A", image_token="<image>"),
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        lambda processor: transformers.LlavaNextForConditionalGeneration(
            transformers.LlavaNextConfig(
                text_config=transformers.LlamaConfig(**text(processor, head_dim=10)),
                vision_config=transformers.CLIPVisionConfig(**vision(image_size=24)),
                image_token_index=token_id(processor, "<image>"),
                image_grid_pinpoints=processor.image_processor.image_grid_pinpoints,
            )
        ),
        placeholder="<image>\n",
        several=True,
    ),
    "Qwen2.5-VL": Entry(
        lambda: qwen_processor(transformers.Qwen2_5_VLProcessor),
        qwen(
            "Qwen2_5_VL",
            [1, 1, 2],
            {"depth": 2, "hidden_size": 36, "out_hidden_size": 48, "num_heads": 3, "intermediate_size": 29}
            | {"window_size": 32, "fullatt_block_indexes": [1]},
        ),
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        several=True,
    ),
    "Qwen3-VL": Entry(
        lambda: qwen_processor(transformers.Qwen3VLProcessor),
        qwen(
            "Qwen3VL",
            [1, 2, 2],
            {"depth": 2, "hidden_size": 36, "out_hidden_size": 48, "num_heads": 3, "intermediate_size": 29}
            | {"num_position_embeddings": 49, "deepstack_visual_indexes": [0]},
            head_dim=10,
        ),
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        several=True,
    ),
    "InternVL": Entry(
        lambda: without_video(transformers.InternVLProcessor)(
            pictures_of("got_ocr2", **square(36), max_patches=4),
            tokenizer(
                start_image_token="<img>",
                end_image_token="</img>",
                context_image_token="<IMG_CONTEXT>",
                video_token="<video>",
            ),
            image_seq_length=9,
        ),
        lambda processor: transformers.InternVLForConditionalGeneration(
            transformers.InternVLConfig(
                text_config=transformers.Qwen2Config(**text(processor)),
                vision_config=vision(image_size=36, patch_size=6),
                image_token_id=processor.image_token_id,
                image_seq_length=9,
            )
        ),
        placeholder="<IMG_CONTEXT>\n",
        several=True,
    ),
    "PaliGemma": Entry(
        lambda: transformers.PaliGemmaProcessor(
            pictures_of("siglip", **square(56), image_seq_length=49), tokenizer(image_token="<image>")
        ),
        lambda processor: transformers.PaliGemmaForConditionalGeneration(
            transformers.PaliGemmaConfig(
                text_config=transformers.GemmaConfig(**text(processor, head_dim=10)),
                vision_config=transformers.SiglipVisionConfig(**vision(), vision_use_head=False),
                image_token_index=processor.image_token_id,
                vocab_size=len(processor.tokenizer),
                projection_dim=48,
                hidden_size=48,
            )
        ),
        placeholder="<image>",
        several=True,
    ),
    "Idefics3": Entry(
        lambda: transformers.Idefics3Processor(*split_parts("idefics3"), image_seq_len=9),
        split_pictures("Idefics3", 2),
        placeholder="<image>",
        several=True,
    ),
    "SmolVLM": Entry(
        smolvlm_processor,
        split_pictures("SmolVLM", 3),
        placeholder="<image>",
        several=True,
    ),
    "Gemma 3": Entry(
        lambda: transformers.Gemma3Processor(
            pictures_of("gemma3", **square(48)),
            tokenizer(
                "[CLS] $A", boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
            ),
            image_seq_length=9,
        ),
        lambda processor: transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(
                text_config=text(
                    processor,
                    head_dim=10,
                    query_pre_attn_scalar=10,
                    sliding_window=16,
                    layer_types=["sliding_attention", "full_attention"],
                ),
                vision_config=transformers.SiglipVisionConfig(**vision(image_size=48), vision_use_head=False),
                mm_tokens_per_image=9,
                boi_token_index=token_id(processor, "<start_of_image>"),
                eoi_token_index=token_id(processor, "<end_of_image>"),
                image_token_index=token_id(processor, "<image_soft_token>"),
            )
        ),
        placeholder="<start_of_image>",
        several=True,
    ),
    "Llama 3.2 Vision": Entry(
        lambda: transformers.MllamaProcessor(
            pictures_of("mllama", **square(24), max_image_tiles=4),
            tokenizer("[CLS] $A", image_token="<|image|>", python_token="<|python_tag|>"),
        ),
        mllama,
        placeholder="<|image|>",
        several=True,
    ),
    "BLIP-2": Entry(
        lambda: transformers.Blip2Processor(
            pictures_of("blip", **square(56)), tokenizer("[CLS] $A"), num_query_tokens=5
        ),
        query_tokens("Blip2"),
        placeholder="",
    ),
    "InstructBLIP": Entry(
        lambda: transformers.InstructBlipProcessor(
            pictures_of("blip", **square(56)), tokenizer("[CLS] $A"), tokenizer("[CLS] $A [END]"), num_query_tokens=5
        ),
        query_tokens("InstructBlip"),
        placeholder="",
    ),
    "Florence-2": Entry(
        lambda: transformers.Florence2Processor(
            pictures_of("clip", **square(48), do_center_crop=False, image_seq_length=37),
            tokenizer(image_token="<image>"),
        ),
        florence,
        placeholder="",
    ),
    "Pix2Struct": Entry(
        lambda: transformers.Pix2StructProcessor(
            pictures_of("pix2struct", patch_size={"height": 8, "width": 8}, is_vqa=False, max_patches=47),
            tokenizer("[CLS] $A"),
        ),
        lambda processor: transformers.Pix2StructForConditionalGeneration(
            transformers.Pix2StructConfig(
                text_config={"vocab_size": len(processor.tokenizer), "hidden_size": 48, "d_kv": 8, "d_ff": 37}
                | {"num_layers": 2, "num_heads": 6, "eos_token_id": 4, "decoder_start_token_id": 0},
                vision_config={"hidden_size": 48, "patch_embed_hidden_size": 192, "d_ff": 29, "d_kv": 11}
                | {"num_hidden_layers": 2, "num_attention_heads": 3, "seq_len": 64},
            )
        ),
        placeholder="",
        read=lambda processor, text, pictures: processor(
            text=text, images=pictures, return_tensors="pt", max_patches=47, add_special_tokens=True
        ),
    ),
    "CLIP": Entry(
        lambda: transformers.CLIPProcessor(pictures_of("clip", **cropped(56)), tokenizer("[CLS] $A [END]")),
        lambda processor: transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config=text(processor, num_key_value_heads=None),
                vision_config=vision(),
                projection_dim=31,
            )
        ),
        placeholder="",
        generates=False,
    ),
    "SigLIP": Entry(
        lambda: transformers.SiglipProcessor(pictures_of("siglip", **square(56)), tokenizer("$A [END]")),
        lambda processor: transformers.SiglipModel(
            transformers.SiglipConfig(
                text_config=text(processor, num_key_value_heads=None, projection_size=33),
                vision_config=vision(),
            )
        ),
        placeholder="",
        generates=False,
    ),
    "BLIP": Entry(
        lambda: transformers.BlipProcessor(pictures_of("blip", **square(56)), tokenizer("[CLS] $A")),
        lambda processor: transformers.BlipForConditionalGeneration(
            transformers.BlipConfig(
                text_config=text(processor, num_key_value_heads=None, sep_token_id=4, projection_dim=31),
                vision_config=vision(projection_dim=31),
                projection_dim=31,
                image_text_hidden_size=31,
            )
        ),
        placeholder="",
    ),
    "ViT": Entry(
        lambda: pictures_of("vit", **square(56)),
        lambda processor: transformers.ViTForImageClassification(transformers.ViTConfig(**vision(), num_labels=5)),
        placeholder=None,
        generates=False,
        read=lambda processor, text, pictures: processor(pictures, return_tensors="pt"),
    ),
    "DINOv2 with registers": Entry(
        lambda: pictures_of("bit", **cropped(56)),
        lambda processor: transformers.Dinov2WithRegistersModel(
            transformers.Dinov2WithRegistersConfig(**vision(intermediate_size=None), num_register_tokens=3)
        ),
        placeholder=None,
        generates=False,
        read=lambda processor, text, pictures: processor(pictures, return_tensors="pt"),
    ),
    "Whisper": Entry(
        lambda: transformers.WhisperProcessor(
            transformers.WhisperFeatureExtractor(feature_size=13, chunk_length=1, n_fft=400, hop_length=160),
            tokenizer("[CLS] $A"),
        ),
        lambda processor: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                **encoder_and_decoder(processor), num_mel_bins=13, max_source_positions=50, max_target_positions=64
            )
        ),
        placeholder="",
        sizes=((16000,), (9000,), (12347,)),
        create=sound,
        read=lambda processor, text, sounds: {
            **processor(sounds, sampling_rate=16000, return_tensors="pt"),
            "decoder_input_ids": processor.tokenizer(text, return_tensors="pt").input_ids,
        },
    ),
    "PatchTST": Entry(
        lambda: None,
        lambda processor: transformers.PatchTSTForPrediction(
            transformers.PatchTSTConfig(
                num_input_channels=3,
                context_length=35,
                patch_length=5,
                patch_stride=5,
                num_hidden_layers=2,
                d_model=48,
                num_attention_heads=6,
                ffn_dim=37,
                prediction_length=7,
            )
        ),
        placeholder=None,
        generates=False,
        sizes=((35,),) * 3,
        create=series,
        read=lambda processor, text, pictures: {"past_values": torch.stack(pictures)},
    ),
}
NAMES = tuple(ENTRIES)
"""Names of the models."""
