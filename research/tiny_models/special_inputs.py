"""Forward inputs of single model types that cannot be derived from names."""

from typing import Any

import torch


def _with_images(make: Any, images: int, **other_inputs: Any) -> dict[str, Any]:
    """Return text whose first tokens are image placeholders, with an image."""
    ids, placeholder = make.tokens(), make.size("image_token_index", "image_token_id", "video_token_index")
    start = 5 if make.side == "left" else 0
    ids[:, start : start + images] = placeholder
    return {
        "input_ids": ids,
        "attention_mask": make.attention_mask(),
        "pixel_values": make.pixel_values(),
        **other_inputs,
    }


def _series(make: Any) -> dict[str, Any]:
    """Return the inputs of time series models."""
    names = ("past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features")
    return {name: make(name) for name in names}


def _blocks(make: Any, text: int = 3) -> dict[str, Any]:
    """Tokens of several codebooks."""
    return {"input_ids": make.tokens(batch=2 * text), "attention_mask": make.attention_mask()}


def _dia(make: Any) -> dict[str, Any]:
    """Return text, and decoder tokens of nine codebooks."""
    codes = torch.stack([make.tokens(11)] * 9, -1)
    return {"input_ids": make.tokens(), "attention_mask": make.attention_mask(), "decoder_input_ids": codes}


def _detection(make: Any) -> dict[str, Any]:
    """Return an image, and a text prompt that names the objects to find."""
    return {
        "pixel_values": make.noise(2, 3, 64, 64),
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
    }


def _heard(make: Any) -> dict[str, Any]:
    """Return audio features, a part of which is padding."""
    bins = make.size("num_mel_bins", default=80)
    mask = (torch.arange(128) < torch.tensor([[128], [96]])).long()
    return {"input_features": make.noise(2, bins, 128), "input_features_mask": mask}


def _flattened(make: Any) -> torch.Tensor:
    """Return image patches, each after its row and column number."""
    row_and_column = torch.stack([1 + torch.arange(13) // 4, 1 + torch.arange(13) % 4], -1).expand(2, -1, -1)
    return torch.cat([row_and_column, make.noise(2, 13, 768)], -1)


def _ragged(make: Any) -> dict[str, Any]:
    """Return the features of two recordings of different length, concatenated."""
    return {"input_features": make.noise(128, 100), "feature_lens": torch.tensor([60, 40])}


def _shaped(make: Any) -> dict[str, Any]:
    """Return images of different shapes as patches."""
    return {
        "pixel_values": make.noise(2, 16, 192),
        "pixel_attention_mask": (torch.arange(16) < torch.tensor([[16], [12]])).long(),
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }


def _line(make: Any) -> dict[str, Any]:
    """Return the image of a line of text."""
    return {"pixel_values": make.noise(2, 3, 96, 96)}


def _packed(make: Any) -> dict[str, Any]:
    """Return images whose patches are concatenated along the width."""
    return {"pixel_values": make.noise(1, 3, 8, 8 * 40), "target_sizes": torch.tensor([[4, 6], [4, 4]])}


INPUTS: dict[str, Any] = {
    "autoformer": _series,
    "informer": _series,
    "time_series_transformer": _series,
    "blip-2": lambda make: _with_images(make, 4),
    "instructblip": lambda make: _with_images(make, 4, qformer_input_ids=make.tokens()),
    "instructblipvideo": lambda make: {
        **_with_images(make, 8, qformer_input_ids=make.tokens()),
        "pixel_values": make.noise(2, 2, 3, 32, 32),
    },
    "blip_2_qformer": lambda make: {
        "query_embeds": make.noise(2, 7, 96),
        "encoder_hidden_states": make.noise(2, 11, make.size("encoder_hidden_size")),
    },
    "instructblip_qformer": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": torch.ones(2, 20, dtype=torch.long),
        "query_embeds": make.noise(2, 7, 96),
        "encoder_hidden_states": make.noise(2, 11, make.size("encoder_hidden_size")),
    },
    "bridgetower": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "pixel_values": make.noise(2, 3, 32, 32),
        "pixel_mask": torch.ones(2, 32, 32),
    },
    "clvp": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "input_features": make.noise(2, 80, 32),
    },
    "decision_transformer": lambda make: {
        "states": make.noise(2, 5, 17),
        "actions": make.noise(2, 5, 4),
        "rewards": make.noise(2, 5, 1),
        "returns_to_go": make.noise(2, 5, 1),
        "timesteps": torch.arange(5).expand(2, -1),
        "attention_mask": torch.ones(2, 5),
    },
    "deepseek_ocr2_encoder": lambda make: {"inputs_embeds": make.noise(2, 16, 96), "num_patches": 16},
    "dia": _dia,
    "dia_decoder": lambda make: {
        "input_ids": torch.stack([make.tokens()] * 9, -1),
        "encoder_hidden_states": make.noise(2, 11, make.size("cross_hidden_size")),
    },
    "fun_asr_nano_encoder": lambda make: {
        "input_features": make.noise(2, 11, 560),
        "input_features_mask": torch.ones(2, 11, dtype=torch.long),
    },
    "gemma3n_audio": lambda make: {
        "audio_mel": make.noise(2, 64, 128),
        "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool),
    },
    "gemma4_audio": lambda make: {
        "input_features": make.noise(2, 64, 128),
        "attention_mask": torch.ones(2, 64, dtype=torch.bool),
    },
    "gemma4_vision": lambda make: {
        "pixel_values": make.noise(2, 9, 3 * 8 * 8),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(3), torch.arange(3)).expand(2, -1, -1),
    },
    "idefics": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "pixel_values": make.noise(2, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(2, 13, 1, dtype=torch.long),
    },
    "idefics2_perceiver": lambda make: {
        "context": make.noise(2, 11, make.size("hidden_size")),
        "attention_mask": torch.ones(2, 11, dtype=torch.long),
    },
    "kosmos-2": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "pixel_values": make.noise(2, 3, 32, 32),
        "image_embeds_position_mask": (torch.arange(13) < make.size("latent_query_num")).long().expand(2, -1),
    },
    "lxmert": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "visual_feats": make.noise(2, 7, 2048),
        "visual_pos": make.noise(2, 7, 4),
    },
    "lightglue": lambda make: {"pixel_values": make.noise(1, 2, 3, 64, 64)},
    "superglue": lambda make: {"pixel_values": make.noise(1, 2, 3, 64, 64)},
    "efficientloftr": lambda make: {"pixel_values": make.noise(1, 2, 1, 64, 64)},
    "mllama_vision_model": lambda make: {
        "pixel_values": make.noise(2, 1, 4, 3, 32, 32),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]], [[1, 1, 0, 0]]]),
    },
    "molmo2_adapter": lambda make: {
        "image_features": make.noise(2, 9, 192),
        "pooled_patches_idx": torch.arange(8).view(4, 2),
    },
    "molmo2_vision": lambda make: {"pixel_values": make.noise(2, 16, 3 * 8 * 8)},
    "muse_glimmer_assistant": lambda make: {
        "noise_embeds": make.noise(2, 5, 96),
        "context_hidden_states": make.noise(2, 7, 96),
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
    },
    "blt": lambda make: {"input_ids": make.tokens(), "attention_mask": make.attention_mask(), "use_cache": False},
    "blt_local_decoder": lambda make: {
        "input_ids": make.tokens(),
        "inputs_embeds": make.noise(2, 13, 96),
        "patch_embeds": make.noise(2, 5, make.size("hidden_size_global")),
        "encoder_attention_mask": torch.zeros(2, 1, 13, 10),
    },
    "blt_local_encoder": lambda make: {
        "input_ids": make.tokens(),
        "num_patches": 5,
        "patch_ids": (torch.arange(13) // 3).expand(2, -1),
        "encoder_attention_mask": torch.zeros(2, 1, 10, 13),
    },
    "kyutai_speech_to_text": lambda make: {
        "input_ids": torch.stack([make.tokens()] * 4, -1),
        "attention_mask": make.attention_mask(),
    },
    "moshi_depth": lambda make: {
        "input_ids": make.tokens(7),
        "last_hidden_state": make.noise(2, 7, make.size("input_size")),
    },
    "omdet-turbo": lambda make: {
        "pixel_values": make.noise(2, 3, 64, 64),
        "classes_input_ids": make.tokens(batch=3),
        "classes_attention_mask": torch.ones(3, 13, dtype=torch.long),
        "tasks_input_ids": make.tokens(),
        "tasks_attention_mask": make.attention_mask(),
        "classes_structure": torch.tensor([2, 1]),
    },
    "audioflamingo3_encoder": _heard,
    "granite_speech_encoder": lambda make: {"hidden_states": make.noise(2, 13, 160)},
    "granite_speech_plus_encoder": lambda make: {"hidden_states": make.noise(2, 13, 160)},
    "granite_speech5_encoder": lambda make: {"input_features": make.noise(2, 64, 320)},
    "granite_speech5_ctc": lambda make: {"input_features": make.noise(2, 64, 320)},
    "perceiver": lambda make: {"inputs": make.noise(2, 13, make.size("d_model"))},
    "phi4_multimodal_audio": lambda make: {
        "hidden_states": make.noise(2, 64, 80),
        "mask": torch.ones(2, 64, dtype=torch.bool),
    },
    "pix2struct": lambda make: {
        "flattened_patches": _flattened(make),
        "attention_mask": make.attention_mask(),
        "decoder_input_ids": make.tokens(11),
    },
    "pix2struct_vision_model": lambda make: {
        "flattened_patches": _flattened(make),
        "attention_mask": make.attention_mask(),
    },
    "pp_ocrv5_mobile_rec": _line,
    "pp_ocrv5_server_rec": _line,
    "pp_ocrv6_small_rec": _line,
    "pp_ocrv6_tiny_rec": _line,
    "paddleocr_vl_vision": lambda make: {
        "pixel_values": make.noise(1, 40, 3, 8, 8),
        "image_grid_thw": make.image_grid_thw(),
    },
    "qwen2_5_omni_audio_encoder": _ragged,
    "qwen3_omni_moe_audio_encoder": _ragged,
    "qwen3_asr_encoder": lambda make: {
        "input_features": make.noise(2, 128, 200),
        "input_features_mask": torch.ones(2, 200, dtype=torch.long),
    },
    "qwen3_omni_moe_talker_text": lambda make: {"inputs_embeds": make.noise(2, 13, 96)},
    "sam3": _detection,
    "sam3_lite_text": _detection,
    "sam3_lite_text_text_model": lambda make: {"input_ids": make.tokens(), "attention_mask": make.attention_mask()},
    "siglip2": lambda make: {"input_ids": make.tokens(), "attention_mask": make.attention_mask(), **_shaped(make)},
    "siglip2_vision_model": _shaped,
    "speech-encoder-decoder": lambda make: {"inputs": make.noise(2, 1600), "decoder_input_ids": make.tokens(11)},
    "t5gemma2_decoder": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "encoder_hidden_states": make.noise(2, 11, 96),
    },
    "timesfm": lambda make: {
        "past_values": make.noise(2, 64),
        "past_values_padding": torch.zeros(2, 64),
        "freq": torch.zeros(2, 1, dtype=torch.long),
    },
    "timesfm2_5": lambda make: {"past_values": make.noise(2, 64)},
    "video_llama_3_vision": lambda make: {
        "pixel_values": make.noise(40, 192),
        "grid_thw": make.grid_thw(),
        "merge_sizes": torch.tensor([2, 2]),
    },
    "vision-text-dual-encoder": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "pixel_values": make.noise(2, 3, 32, 32),
    },
    "vitmatte": lambda make: {"pixel_values": make.noise(2, 4, 64, 64)},
    "yolos": lambda make: {"pixel_values": make.noise(2, 3, 32, 40)},
    "vjepa2": lambda make: {"pixel_values_videos": make.noise(2, 4, 3, 32, 32)},
    "xclip": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "pixel_values": make.noise(2, make.size("num_frames", default=8), 3, 32, 32),
    },
    "xclip_vision_model": lambda make: {"pixel_values": make.noise(2 * make.size("num_frames", default=8), 3, 32, 32)},
    "inkling_audio": lambda make: {"audio_input_ids": torch.stack([make.tokens()] * 80, -1)},
    "depth_pro": lambda make: {"pixel_values": make.noise(1, 3, 64, 64)},
    "muse_spark_audio": lambda make: {"input_values": make.noise(2, 7 * 1920)},
    "jev": lambda make: {
        "input_ids": make.tokens(batch=1),
        "marks": torch.tensor([[5, 9, 12]]),
        "num_options": torch.tensor([[2, 2, 2]]),
        "question_type_ids": torch.tensor([[0, 0, 0]]),
    },
    "inkling2_vision": lambda make: {
        "pixel_values": make.noise(40, 16, 16, 3),
        "image_grid_thw": make.image_grid_thw(),
    },
    "minicpm_ocr_vision": _packed,
    "minicpmv4_6_vision": _packed,
    "minicpmv4_7_vision": _packed,
    "hrm_text": lambda make: {"input_ids": make.tokens(), "attention_mask": make.attention_mask(), "use_cache": False},
    "florence_vision": lambda make: {"hidden_states": make.noise(2, 3, 32, 32)},
    "musicgen_decoder": lambda make: {"input_ids": make.tokens(batch=8), "attention_mask": make.attention_mask()},
    "musicgen_melody_decoder": lambda make: {
        "input_ids": make.tokens(batch=8),
        "attention_mask": make.attention_mask(),
    },
    "musicgen": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "decoder_input_ids": make.tokens(11, batch=8),
    },
    "musicgen_melody": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "decoder_input_ids": make.tokens(11, batch=8),
    },
    "kosmos_2_5_vision_model": lambda make: {
        "hidden_states": make.noise(2, 11, 96),
        "attention_mask": torch.ones(2, 11),
    },
    "llama4_vision_model": lambda make: {"pixel_values": make.noise(2, 3, 32, 32)},
    "inkling_vision": lambda make: {"pixel_values": make.noise(3, 2, 32, 32, 3)},
    "grounding-dino": _detection,
    "mm-grounding-dino": _detection,
    "audio-spectrogram-transformer": lambda make: {"input_values": make.noise(2, 64, 128)},
    "clap": lambda make: {
        "input_ids": make.tokens(),
        "attention_mask": make.attention_mask(),
        "input_features": make.noise(2, 1, 64, 64),
        "is_longer": torch.tensor([[False], [False]]),
    },
    "clap_audio_model": lambda make: {
        "input_features": make.noise(2, 1, 64, 64),
        "is_longer": torch.tensor([[False], [False]]),
    },
    "oneformer": lambda make: {"pixel_values": make.noise(2, 3, 64, 64), "task_inputs": make.tokens(77)},
    "speecht5": lambda make: {
        "input_values": make.noise(2, 13, 96),
        "decoder_input_values": make.noise(2, 11, 96),
    },
}
"""For each model type, a function that returns the arguments of its forward from a `Maker`."""
