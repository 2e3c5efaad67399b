"""headwise: multi-head attention for PyTorch with every head in reach."""

from headwise.attention.attend import attend, explain, why_not
from headwise.attention.blockwise import Blockwise
from headwise.attention.cache import Cache, DynamicCache, SlidingCache, StaticCache
from headwise.attention.detail import Detail
from headwise.attention.masks import Mask
from headwise.attention.positions import ALiBi, PositionBias, RelativeBias
from headwise.attention.rotary import DynamicNTK, LinearScaling, Llama3, Rotary, YaRN
from headwise.attention.rules import causal, chunked, dense, padding, per_head, prefix, segments, where, window
from headwise.convert.fuse import fuse_projections, separate_projections
from headwise.convert.linear import from_heads, from_projections, to_heads, to_projections
from headwise.convert.torch import from_torch, to_torch
from headwise.convert.transformers import from_transformers, to_transformers
from headwise.errors import HeadwiseError, InputError, MissingExtra
from headwise.heads.ablate import Ablation, SetAblation, ablate
from headwise.heads.agreement import Agreement, agreement
from headwise.heads.attribution import Attribution, logit_attribution
from headwise.heads.compare import compare
from headwise.heads.data import Texts
from headwise.heads.gate import gate
from headwise.heads.importance import Importance, importance
from headwise.heads.losses import EmbeddingDistance, MaskedTokenLoss, next_token_loss
from headwise.heads.outputs import record
from headwise.heads.patching import Patching, activation_patching, patch_together
from headwise.heads.profile import profile
from headwise.heads.record import Profile, load_profile
from headwise.heads.redundancy import Redundancy, redundancy
from headwise.heads.repeats import random_repeats
from headwise.heads.replacements import mean, patch, resample, uniform, zero
from headwise.heads.view import view
from headwise.layer import MultiHeadAttention, ProjectedContext
from headwise.models.watch import watch
from headwise.options import QKNorm, Scores
from headwise.studies.evidence import Study
from headwise.studies.settings import Setting, Space
from headwise.studies.study import study
from headwise.studies.texts import study_texts
from headwise.studies.training import Recipe
from headwise.variants.differential import DifferentialAttention
from headwise.variants.latent import LatentAttention

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Ablation",
    "Agreement",
    "Attribution",
    "Blockwise",
    "Cache",
    "Detail",
    "DifferentialAttention",
    "DynamicCache",
    "DynamicNTK",
    "EmbeddingDistance",
    "HeadwiseError",
    "Importance",
    "InputError",
    "LatentAttention",
    "LinearScaling",
    "Llama3",
    "Mask",
    "MaskedTokenLoss",
    "MissingExtra",
    "MultiHeadAttention",
    "Patching",
    "PositionBias",
    "Profile",
    "ProjectedContext",
    "QKNorm",
    "Recipe",
    "Redundancy",
    "RelativeBias",
    "Rotary",
    "Scores",
    "SetAblation",
    "Setting",
    "SlidingCache",
    "Space",
    "StaticCache",
    "Study",
    "Texts",
    "YaRN",
    "ablate",
    "activation_patching",
    "agreement",
    "attend",
    "causal",
    "chunked",
    "compare",
    "dense",
    "explain",
    "from_heads",
    "from_projections",
    "from_torch",
    "from_transformers",
    "fuse_projections",
    "gate",
    "importance",
    "load_profile",
    "logit_attribution",
    "mean",
    "next_token_loss",
    "padding",
    "patch",
    "patch_together",
    "per_head",
    "prefix",
    "profile",
    "random_repeats",
    "record",
    "redundancy",
    "resample",
    "segments",
    "separate_projections",
    "study",
    "study_texts",
    "to_heads",
    "to_projections",
    "to_torch",
    "to_transformers",
    "uniform",
    "view",
    "watch",
    "where",
    "why_not",
    "window",
    "zero",
]
