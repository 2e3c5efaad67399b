"""Config sizes and model classes of single model types that cannot be derived from names."""

from typing import Any

TIMM_FREE: dict[str, Any] = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": ["stage2", "stage3", "stage4"],
    },
}
"""Config of a backbone that needs no other package."""
ONE_STAGE = TIMM_FREE | {"backbone_config": TIMM_FREE["backbone_config"] | {"out_features": ["stage4"]}}
FLOW = {"flow_head_config.condition_dim": 96}
SERIES = {"prediction_length": 5, "context_length": 11, "lags_sequence": [1, 2, 3]}
VOCABULARY_MAP = {
    "<image>": 60,
    "<|extra_200|>": 61,
    "<|image token|>": 62,
    **{f"IMGIMGA{i}Z": 63 + i for i in range(2)},
}
QUANTISED = {"upsample_groups": 1, "num_quantizers": 4, "codebook_dim": 96}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 97,
    "split_ngram_parts": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 16,
}

SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
HALF_SECTIONS = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [1, 1, 2],
    "partial_rotary_factor": 0.5,
}

SPOKEN = {"vision_start_token_id": 65, "audio_start_token_id": 66}
PROMPTED = {
    "prompt_encoder_config.image_size": 32,
    "prompt_encoder_config.patch_size": 8,
    "prompt_encoder_config.image_embedding_size": 4,
    "vision_config.num_pos_feats": 48,
}
SAM2_VISION = {
    "vision_config.backbone_config.image_size": [64, 64],
    "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}
SAM2 = SAM2_VISION | {"prompt_encoder_config.image_size": 64, "prompt_encoder_config.patch_size": 16}
SAM2_VIDEO = {"image_size": 64, "memory_attention_rope_feat_sizes": [4, 4], "memory_attention_rope_k_sizes": [2, 2]}
SAM3 = {
    "vision_config.backbone_config.window_size": 2,
    "vision_config.backbone_config.pretrain_image_size": 32,
    "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "autoformer": (SERIES, {"moving_average": 5}),
    "informer": (SERIES, {}),
    "time_series_transformer": (SERIES, {}),
    "bloom": ({}, {"hidden_size": 96}),
    "blt": ({}, {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]}),
    "chameleon": ({"vocabulary_map": VOCABULARY_MAP}, {}),
    "emu3": ({"vocabulary_map": VOCABULARY_MAP}, {}),
    "conditional_detr": ({}, ONE_STAGE),
    "dab-detr": ({}, ONE_STAGE),
    "detr": ({}, ONE_STAGE),
    "table-transformer": ({}, ONE_STAGE),
    "deformable_detr": ({}, TIMM_FREE),
    "led": ({}, {"attention_window": 8}),
    "longformer": ({}, {"attention_window": 8}),
    "cohere_compass_text": (
        {},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "dbrx": ({}, {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0, "d_model": 96}),
    "deepseek_ocr2_text": ({}, {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}),
    "deepseek_ocr2": (
        {},
        {"text_config.mlp_layer_types": ["dense", "sparse"], "text_config.num_experts_per_tok": 2},
    ),
    "diffusion_gemma_text": ({}, {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}),
    "diffusion_gemma": (
        {},
        {"text_config.num_experts": 4, "text_config.top_k_experts": 2, "text_config.moe_intermediate_size": 32},
    ),
    "dots1": ({}, {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}),
    "dots3_note_text": ({}, {"head_dim": 24}),
    "dots3_note": (
        {},
        {
            "text_config.head_dim": 24,
            "vision_config.adapter_in_dim": 96,
            "vision_config.adapter_out_dim": 96,
            "audio_config.adapter_out_dim": 96,
            "audio_config.adapter_input_size": 96,
        },
    ),
    "dots3_note_audio_encoder": ({}, {"adapter_input_size": 96}),
    "dots3_note_vision_encoder": ({}, {"adapter_in_dim": 96}),
    "efficientloftr": ({}, {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}),
    "esm": ({}, {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1}),
    "falcon_h1": ({}, {"mamba_d_ssm": 192, "mamba_d_head": 16}),
    "fun_asr_nano": ({}, {"adaptor_config.intermediate_size": 24}),
    "gemma4_assistant": (
        {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
        {"text_config.num_kv_shared_layers": 2, "backbone_hidden_size": 96},
    ),
    "gemma4_unified_assistant": ({}, {"text_config.num_kv_shared_layers": 2, "backbone_hidden_size": 96}),
    "cohere_compass": (
        {},
        {"text_config.rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "pix2struct_text_model": ({}, {"initializer_range": 0.02}),
    "t5gemma2_text": ({}, {"dropout_rate": 0.0}),
    "t5gemma2_decoder": ({}, {"dropout_rate": 0.0}),
    "t5gemma2_encoder": ({}, {"text_config.dropout_rate": 0.0}),
    "qwen3_omni_moe": (
        {},
        {
            "talker_config.text_config.shared_expert_intermediate_size": 32,
            "talker_config.spatial_merge_size": 2,
            "thinker_config.vision_start_token_id": 65,
            "thinker_config.audio_start_token_id": 66,
        },
    ),
    "deepseek_v2": ({}, {"num_experts_per_tok": 2}),
    "glm5_next": ({}, {"text_config.index_topk": 4, "text_config.index_kpool": 2}),
    "glm5_next_text": ({}, {"index_topk": 4, "index_kpool": 2}),
    "gradium_phonon_tts": ({}, FLOW),
    "pocket_tts": ({}, FLOW),
    "granite4_vision": ({}, {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0], "downsample_rate": "1/2"}),
    "granite_speech5_ctc": ({}, {"encoder_config.context_size": 16, "context_size": 16}),
    "granite_speech5_encoder": ({}, {"context_size": 16}),
    "grounding-dino": ({}, {"encoder_ffn_dim": 192}),
    "mm-grounding-dino": ({}, {"encoder_ffn_dim": 192}),
    "hunyuan_v1_dense": ({}, {"head_dim": 16}),
    "hunyuan_v1_moe": ({}, {"head_dim": 16}),
    "glm46v": ({}, {"text_config.rope_parameters": SECTIONS}),
    "glm4v": ({}, {"text_config.rope_parameters": SECTIONS}),
    "glm4v_text": ({}, {"rope_parameters": SECTIONS}),
    "glm_image": ({}, {"text_config.rope_parameters": SECTIONS}),
    "glm_image_text": ({}, {"rope_parameters": SECTIONS}),
    "glm_ocr": ({}, {"text_config.rope_parameters": SECTIONS}),
    "glm_ocr_text": ({}, {"rope_parameters": SECTIONS}),
    "paddleocr_vl": ({}, {"text_config.rope_parameters": SECTIONS}),
    "paddleocr_vl_text": ({}, {"rope_parameters": SECTIONS}),
    "hunyuan_vl": ({}, {"text_config.rope_parameters": SECTIONS, "text_config.head_dim": 16}),
    "hunyuan_vl_text": ({}, {"rope_parameters": SECTIONS, "head_dim": 16}),
    "glm4v_moe": ({}, {"text_config.rope_parameters": HALF_SECTIONS}),
    "glm4v_moe_text": ({}, {"rope_parameters": HALF_SECTIONS}),
    "colqwen2": ({}, {"vlm_config.text_config.rope_parameters": SECTIONS}),
    "bamba": ({}, {"attn_layer_indices": [1]}),
    "granitemoehybrid": ({}, {"layer_types": ["mamba", "attention"]}),
    "jamba": ({}, {"attn_layer_offset": 1, "attn_layer_period": 2}),
    "clvp_encoder": ({}, {"num_attention_heads": 3}),
    "clvp": (
        {},
        {f"{part}.num_attention_heads": 3 for part in ("text_config", "speech_config", "decoder_config")}
        | {"text_config.vocab_size": 256, "decoder_config.vocab_size": 8194, "speech_config.vocab_size": 8194},
    ),
    "encodec": ({}, {"codebook_dim": 96}),
    "deepseek_ocr2_vision": ({}, {"sam_config.downsample_channels": [64, 96]}),
    "llama4_vision_model": ({}, {"intermediate_size": 384}),
    "longcat_flash": ({}, {"head_dim": 8}),
    "mistral4": ({}, {"head_dim": 16}),
    "mimo_v2_flash": ({}, {"num_key_value_heads": 3}),
    "janus_vqgan": ({}, {"num_patches": 2}),
    "fast_vlm": ({"vision_config": {"model_type": "clip_vision_model"}}, {}),
    "omdet-turbo": (
        {
            "vision_features_channels": [96, 96, 96],
            "apply_layernorm_after_vision_backbone": False,
            "use_timm_backbone": False,
            "backbone": None,
            "backbone_config": {"model_type": "swin", "out_indices": [2, 3, 4]},
        },
        {},
    ),
    "deepseek_v4": ({}, {"head_dim": 16}),
    "depth_anything": ({}, {"reassemble_hidden_size": 96}),
    "prompt_depth_anything": ({}, {"reassemble_hidden_size": 96}),
    "bailing_hybrid": ({}, {"n_group": 1, "num_expert_group": 1, "topk_group": 1}),
    "pp_doclayout_v2": ({}, {"class_thresholds": [0.5] * 25, "decoder_in_channels": [96, 96, 96]}),
    "pp_doclayout_v3": ({}, {"decoder_in_channels": [96, 96, 96]}),
    "pp_doclayout_v4": ({}, {"decoder_in_channels": [96, 96, 96]}),
    "phi4_multimodal_audio": ({}, {"nemo_conv_channels": 96}),
    "phi4_multimodal": ({}, {"audio_config.nemo_conv_channels": 96}),
    "qwen2_vl": ({}, {"text_config.rope_parameters": SECTIONS}),
    "qwen2_vl_text": ({}, {"rope_parameters": SECTIONS}),
    "qwen2_5_vl": ({}, {"text_config.rope_parameters": SECTIONS}),
    "qwen2_5_vl_text": ({}, {"rope_parameters": SECTIONS}),
    "qwen2_5_omni_text": ({}, {"rope_parameters": SECTIONS}),
    "qwen2_5_omni_thinker": ({}, SPOKEN | {"text_config.rope_parameters": SECTIONS}),
    "qwen2_5_omni": (
        {},
        {f"thinker_config.{name}": value for name, value in SPOKEN.items()}
        | {"thinker_config.text_config.rope_parameters": SECTIONS},
    ),
    "qwen3_omni_moe_thinker": ({}, SPOKEN),
    "recurrent_gemma": ({}, {"block_types": ["recurrent", "attention"], "num_hidden_layers": 2, "lru_width": 96}),
    "rt_detr": ({}, {"decoder_in_channels": [96, 96, 96]}),
    "rt_detr_v2": ({}, {"decoder_in_channels": [96, 96, 96]}),
    "sam": ({}, PROMPTED | {"vision_config.output_channels": 96}),
    "sam_hq": (
        {},
        PROMPTED | {"vision_config.output_channels": 96, "mask_decoder_config.vit_dim": 96},
    ),
    "sapiens2": ({}, {"num_key_value_heads_per_layer": [6, 6], "num_key_value_attention_heads": 6}),
    "shieldgemma2": ({}, {"yes_token_index": 7, "no_token_index": 8}),
    "step3p5": ({}, {"sliding_window": 4}),
    "step3p7": ({}, {"text_config.sliding_window": 4}),
    "superglue": ({}, {"hidden_size": 256, "num_attention_heads": 4}),
    "swin": (
        {},
        {
            "window_size": 4,
            "depths": [1, 1],
            "num_heads": [3, 6],
            "image_size": 32,
            "out_features": ...,
            "out_indices": ...,
        },
    ),
    "rwkv": ({}, {"attention_hidden_size": 96}),
    "vjepa2": ({}, {"crop_size": 32, "frames_per_clip": 4}),
    "yolos": ({}, {"image_size": [32, 40]}),
    "vitmatte": (
        {},
        {"backbone_config.num_channels": 4, "backbone_config.patch_size": 16, "backbone_config.image_size": 64},
    ),
    "xmod": ({}, {"default_language": "en_XX"}),
    "zamba2": (
        {},
        {
            "attention_hidden_size": 192,
            "attention_head_dim": 32,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "hybrid_layer_ids": [1, 3],
            "mamba_headdim": 24,
            "n_mamba_heads": 8,
        },
    ),
    "xclip": ({}, {"vision_config.mit_hidden_size": 96, "vision_config.mit_num_attention_heads": 6}),
    "mllama_vision_model": ({}, {"intermediate_layers_indices": [1]}),
    "molmo2_vision": ({}, {"image_size": [32, 32], "num_position_embeddings": 16}),
    "d_fine": ({}, {"decoder_in_channels": [96, 96, 96]}),
    "deimv2": ({}, {"decoder_in_channels": [96, 96, 96]}),
    "codegen": ({}, {"n_head": 4, "n_embd": 64, "rotary_dim": 8}),
    "align": ({}, {"vision_config.hidden_dim": 640, "projection_dim": 640}),
    "layoutlmv3": ({}, {"coordinate_size": 16, "shape_size": 16, "image_size": 32, "input_size": 32}),
    "bros": (
        {},
        {
            "hidden_size": 128,
            "num_attention_heads": 4,
            "dim_bbox_projection": ...,
            "dim_bbox_sinusoid_emb_2d": ...,
            "dim_bbox_sinusoid_emb_1d": ...,
        },
    ),
    "donut-swin": ({}, {"window_size": 4, "depths": [1, 1], "num_heads": [3, 6], "image_size": 32}),
    "depth_pro": ({}, {"patch_size": 16, "intermediate_hook_ids": [1, 0]}),
    "mobilevitv2": ({}, {"image_size": 64}),
    "levit": ({}, {"image_size": 64, "patch_size": 16}),
    "kyutai_speech_to_text": ({}, {"num_codebooks": 3}),
    "efficientnet": ({}, {"hidden_dim": 2560}),
    "blip-2": ({}, {"num_query_tokens": 4, "image_token_index": 60}),
    "instructblip": ({}, {"num_query_tokens": 4, "image_token_index": 60}),
    "instructblipvideo": ({}, {"num_query_tokens": 4, "video_token_index": 60}),
    "audio-spectrogram-transformer": ({}, {"max_length": 64}),
    "clap": (
        {},
        {
            "audio_config.spec_size": 64,
            "audio_config.window_size": 4,
            "audio_config.num_mel_bins": 64,
            "audio_config.depths": [1, 1],
            "audio_config.num_attention_heads": [3, 6],
            "audio_config.hidden_size": 192,
        },
    ),
    "clap_audio_model": (
        {},
        {
            "spec_size": 64,
            "window_size": 4,
            "num_mel_bins": 64,
            "depths": [1, 1],
            "num_attention_heads": [3, 6],
            "hidden_size": 192,
        },
    ),
    "kosmos-2": ({}, {"latent_query_num": 4}),
    "sam2": ({}, SAM2),
    "sam2_video": ({}, SAM2 | SAM2_VIDEO),
    "edgetam_video": ({}, SAM2 | SAM2_VIDEO),
    "sam2_vision_model": ({}, {name.removeprefix("vision_config."): value for name, value in SAM2_VISION.items()}),
    "sam2_hiera_det_model": ({}, {"image_size": [64, 64], "window_size_per_stage": [8, 4, 14, 7]}),
    "sam3_vision_model": ({}, {name.removeprefix("vision_config."): value for name, value in SAM3.items()}),
    "sam3_lite_text_text_model": ({}, {"num_hidden_layers": 4}),
    "sam3_vit_model": ({}, {"window_size": 2, "pretrain_image_size": 32}),
    "sam3": ({}, SAM3),
    "sam3_lite_text": ({}, SAM3),
    "sam3_tracker": ({}, SAM3 | {"prompt_encoder_config.image_size": 32, "prompt_encoder_config.patch_size": 8}),
    "muse_glimmer_assistant": ({}, {"target_layer_ids": [0]}),
    "ministral": ({}, {"head_dim": 16}),
    "lfm2_moe": ({}, {"layer_types": ["conv", "full_attention"]}),
    "lw_detr": ({}, {"backbone_config.num_windows": 4, "backbone_config.num_windows_side": 2}),
    "lw_detr_vit": ({}, {"num_windows": 4, "num_windows_side": 2}),
    "mamba2": ({}, {"num_heads": 12}),
    "mimi": ({}, QUANTISED),
    "mimi_decoder": ({}, QUANTISED),
    "csm": ({}, {f"codec_config.{name}": value for name, value in QUANTISED.items()}),
    "pocket_tts_audio_tokenizer": ({}, QUANTISED),
    "pocket_tts_audio_tokenizer_decoder": ({}, QUANTISED),
    "molmo2": ({}, {"adapter_config.vision_feature_layer": [1, 0]}),
    "moonshine_streaming": ({}, {"num_key_value_heads": 6}),
    "nemotron": ({}, {"num_key_value_heads": 2}),
    "oneformer": ({}, {"hidden_dim": 96, "conv_dim": 96, "mask_dim": 96}),
    "qwen3_omni_moe_talker_text": ({}, {"shared_expert_intermediate_size": 32}),
    "qwen4_exp_text": ({}, INDEXER),
    "qwen4_exp": ({}, {f"text_config.{name}": value for name, value in INDEXER.items()}),
    "reformer": (
        {},
        {
            "axial_pos_embds_dim": [32, 64],
            "axial_pos_shape": [4, 4],
            "attn_layers": ["local", "lsh"],
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "num_buckets": 4,
            "max_position_embeddings": 16,
        },
    ),
    "zamba": (
        {},
        {
            "num_hidden_layers": 6,
            "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
            "attention_hidden_size": 192,
            "attention_head_dim": 32,
            "mamba_dt_rank": 6,
        },
    ),
    "xcodec2": ({}, {"encoder_hidden_size": 32}),
    "neucodec": ({}, {"encoder_hidden_size": 32}),
    "esmfold2": (
        {},
        {
            "single_inputs_size": 163,
            "atom_encoder.head_dim": 32,
            "structure_head.diffusion_module.atom_encoder.head_dim": 32,
        },
    ),
    "ernie4_5_vl_moe_text": (
        {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]}},
    ),
    "ernie4_5_vl_moe": (
        {},
        {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]}},
    ),
}
"""For each model type, the arguments of its config, and values that replace shrunk entries, by dotted path; `...`
removes an entry.
"""

PARTS = {"bark": "semantic_config", "qwen3_omni_moe": "thinker_config", "qwen2_5_omni": "thinker_config"}
"""For each model type, the part of its config that the model class takes, if the model class of the whole config has no
forward pass.
"""

GAINS = {"mobilebert": 0.4, "florence_vision": 0.5, "florence2": 0.5, "albert": 0.5, "sam2": 0.5}
"""For each model type, a factor that makes its weight matrices smaller, if nothing in the model bounds the
activations.
"""

CLASSES: dict[str, str] = {
    "bark": "BarkSemanticModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}
"""For each model type, the name of the class to build."""
