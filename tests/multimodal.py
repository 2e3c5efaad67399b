"""Tiny random models of transformers that read pictures or sound, each with a processor, prompts and pictures.

`NAMES` lists the models and `case` builds one of them. A new model is one entry of `ENTRIES`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import models, pre_tokenizers, processors

import tiny

SIZES = ((60, 60), (90, 45), (50, 110))
"""Width and height of the pictures."""


@dataclass(frozen=True)
class Entry:
    """Functions that build a model and its processor, and the form of its prompts.

    Attributes:
        processor: returns the processor.
        model: returns the model for a processor.
        picture: text that stands for one picture in a prompt; None if the model reads no text.
        several: whether a prompt may have more than one picture.
        generates: whether the model has `generate`.
        sizes: width and height of the pictures.
        read: function of processor, text and pictures that returns the model's inputs.
    """

    processor: Callable[[], Any]
    model: Callable[[Any], torch.nn.Module]
    picture: str | None
    several: bool = False
    generates: bool = True
    sizes: tuple = SIZES
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
        if self.entry.picture is None:
            return None
        words = [" ".join(tiny.WORDS[start : start + 3]) for start in range(0, 3 * pictures, 3)]
        return " ".join(self.entry.picture + three for three in words) or " ".join(tiny.WORDS[:3])

    def inputs(self, *pictures):
        """Return the model's inputs for a prompt with these pictures."""
        return self.entry.read(self.processor, self.prompt(len(pictures)), list(pictures))


def case(name: str) -> Case:
    """Return the model of this name with its processor; its weights are the same in each call."""
    entry = ENTRIES[name]
    processor = entry.processor()
    torch.manual_seed(0)
    return Case(name, tiny.with_distinct_heads(entry.model(processor)), processor, entry)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture of random colours in blocks of 5x5 pixels, which resizing does not average out."""
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 5), -(-width // 5), 3), dtype=np.uint8)
    return Image.fromarray(blocks.repeat(5, 0).repeat(5, 1)[:height, :width])


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
    """Return the sizes of a language model for the tokenizer of a processor: 6 heads, 2 of keys and values."""
    sizes = {"vocab_size": len(processor.tokenizer), "hidden_size": 48, "intermediate_size": 37}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 4}
    return sizes | {"max_position_embeddings": 512} | ids | options


def vision(**options) -> dict:
    """Return the sizes of a vision model: 3 heads of dimension 11, 7x7 patches."""
    sizes = {"hidden_size": 33, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 3}
    return sizes | {"image_size": 56, "patch_size": 8} | options


def token_id(processor, token: str) -> int:
    """Return the id of a special token."""
    return processor.tokenizer.convert_tokens_to_ids(token)


def llava_next(processor):
    config = transformers.LlavaNextConfig(
        text_config=transformers.LlamaConfig(**text(processor, head_dim=10)),
        vision_config=transformers.CLIPVisionConfig(**vision(image_size=24)),
        image_token_index=token_id(processor, "<image>"),
        image_grid_pinpoints=processor.image_processor.image_grid_pinpoints,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def qwen(family: str, vision_sizes: dict, **options):
    """Return a function that builds a model of the Qwen-VL families for a processor."""

    def build(processor):
        rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
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


def qwen_processor(processor_class: type):
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
        picture="<image>\n",
        several=True,
    ),
    "Qwen2-VL": Entry(
        lambda: qwen_processor(transformers.Qwen2VLProcessor),
        qwen("Qwen2VL", {"depth": 2, "embed_dim": 36, "hidden_size": 48, "num_heads": 3}),
        picture="<|vision_start|><|image_pad|><|vision_end|>",
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
        llava_next,
        picture="<image>\n",
        several=True,
    ),
    "CLIP": Entry(
        lambda: transformers.CLIPProcessor(pictures_of("clip", **cropped(56)), tokenizer("[CLS] $A [END]")),
        lambda processor: transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config={key: value for key, value in text(processor).items() if key != "num_key_value_heads"},
                vision_config=vision(),
                projection_dim=31,
            )
        ),
        picture="",
        generates=False,
    ),
    "ViT": Entry(
        lambda: pictures_of("vit", **square(56)),
        lambda processor: transformers.ViTForImageClassification(transformers.ViTConfig(**vision(), num_labels=5)),
        picture=None,
        generates=False,
        read=lambda processor, text, pictures: processor(pictures, return_tensors="pt"),
    ),
}
NAMES = tuple(ENTRIES)
"""Names of the models."""
