"""headwise: multi-head attention for PyTorch with access to every head.

The layers, `attend`, masks, converters and `watch` are imported with the package. Everything that runs models over data
(profiles, ablation, studies and their tables and plots) is imported when its name is first used.
"""

from typing import TYPE_CHECKING, Any

from headwise.attention.attend import attend, explain, why_not
from headwise.attention.backends.blockwise.backend import Blockwise
from headwise.attention.backends.gpu.flex import Flex
from headwise.attention.caches.base import Cache
from headwise.attention.caches.dynamic import DynamicCache
from headwise.attention.caches.sliding import SlidingCache
from headwise.attention.caches.static import StaticCache
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import (
    causal,
    chunked,
    dense,
    mask_rule,
    padding,
    per_head,
    prefix,
    segments,
    window,
)
from headwise.attention.position_bias import ALiBi, PositionBias, RelativeBias
from headwise.attention.rotary import Rotary
from headwise.attention.rotary_scaling import DynamicNTK, LinearScaling, Llama3, YaRN
from headwise.convert.fused_qkv import fuse_projections, separate_projections
from headwise.convert.linear import from_heads, from_projections, to_heads, to_projections
from headwise.convert.torch import from_torch, to_torch
from headwise.convert.transformers import from_transformers, to_transformers
from headwise.errors import HeadwiseError, InputError, MissingExtra
from headwise.intercept.accelerate import Acceleration, accelerate
from headwise.intercept.site import Site
from headwise.intercept.watch import watch
from headwise.nn.differential import DifferentialAttention
from headwise.nn.latent import LatentAttention
from headwise.nn.linear_engine import explain_linear
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import QKNorm, Scores
from headwise.nn.qkv_projection import ProjectedContext
from headwise.statistics.weight_capture import WeightCapture

if TYPE_CHECKING:
    from headwise.analysis import replacements
    from headwise.analysis.ablate import ablate
    from headwise.analysis.ablation_result import Ablation, SetAblation
    from headwise.analysis.attribution import Attribution, logit_attribution
    from headwise.analysis.circuits.circuits import Circuits, circuits
    from headwise.analysis.circuits.composition_table import Composition
    from headwise.analysis.circuits.factored import FactoredMatrix
    from headwise.analysis.circuits.scores import CircuitScores
    from headwise.analysis.compare import compare
    from headwise.analysis.curves.attention_distances import attention_distances
    from headwise.analysis.curves.distance_table import AttentionDistances, DistanceCurve
    from headwise.analysis.curves.position_curves import position_curves
    from headwise.analysis.curves.position_table import PositionCurves, PositionSlopes
    from headwise.analysis.flow.norm_table import NormWeighted
    from headwise.analysis.flow.norm_weighted import norm_weighted
    from headwise.analysis.flow.rollout import rollout
    from headwise.analysis.flow.rollout_table import Rollout, RolloutLayers
    from headwise.analysis.flow.token_rollout import TokenRollout, token_rollout
    from headwise.analysis.focus import Focus
    from headwise.analysis.gate import gate
    from headwise.analysis.head_tests.dependencies import dependency_accuracy
    from headwise.analysis.head_tests.dependency_table import DependencyAccuracy, DependencyHeads
    from headwise.analysis.head_tests.haystacks import Needle
    from headwise.analysis.head_tests.name_mover_table import NameMovers
    from headwise.analysis.head_tests.name_movers import name_movers
    from headwise.analysis.head_tests.retrieval import Retrieval, retrieval_score
    from headwise.analysis.head_tests.sinks import SinkRate, sink_rate
    from headwise.analysis.importance.agreement import Agreement, agreement
    from headwise.analysis.importance.importance import Importance, importance
    from headwise.analysis.in_context.in_context_score import in_context_score
    from headwise.analysis.in_context.table import InContextScores
    from headwise.analysis.losses import EmbeddingDistance, MaskedTokenLoss, next_token_loss
    from headwise.analysis.page import write_page
    from headwise.analysis.patching.activation_patching import activation_patching, patch_together
    from headwise.analysis.patching.attribution_patching import attribution_patching
    from headwise.analysis.patching.path_patching import path_patching
    from headwise.analysis.patching.prompts import patching_prompts
    from headwise.analysis.patching.table import AttributionPatching, Patching, PathPatching
    from headwise.analysis.profile import Profile, load_profile, profile
    from headwise.analysis.pruning_curve import pruning_curve
    from headwise.analysis.pruning_curve_table import PruningCurve
    from headwise.analysis.recording import record_outputs
    from headwise.analysis.redundancy.redundancy import redundancy
    from headwise.analysis.redundancy.result import Redundancy
    from headwise.analysis.view import view
    from headwise.analysis.view_examples import view_examples
    from headwise.analysis.view_image import view_image
    from headwise.analysis.view_result import View
    from headwise.analysis.view_set import ViewSet
    from headwise.compression.healing.heal import heal
    from headwise.compression.merging.merge_kv import merge_kv
    from headwise.compression.pruning.plan_pruning import plan_pruning
    from headwise.compression.pruning.prune import prune
    from headwise.compression.pruning.pruning_plan import PruningPlan
    from headwise.compression.recipe.compress import compress
    from headwise.compression.recipe.recipe_result import RecipeResult
    from headwise.compression.report.compression_report import compression_report
    from headwise.compression.report.report_result import CompressionReport
    from headwise.compression.saving import save_model
    from headwise.compression.scores.least_squares import LeastSquaresScores
    from headwise.compression.scores.magnitude import MagnitudeScores
    from headwise.compression.scores.measured import AblationScores, ImportanceScores
    from headwise.compression.streaming.localize import localize
    from headwise.compression.streaming.streaming_heads import StreamingHeads
    from headwise.data.models import load
    from headwise.data.random_repeats import random_repeats
    from headwise.data.texts import Texts
    from headwise.monitoring.alarms import Alarm, AlarmLimits
    from headwise.monitoring.history import History
    from headwise.monitoring.lightning_callback import LightningMonitor
    from headwise.monitoring.monitor import Monitor, monitor
    from headwise.monitoring.qk_clip import ClippedHead, qk_clip
    from headwise.monitoring.trainer_callback import MonitorCallback
    from headwise.studies.budget import StudyBudget
    from headwise.studies.corpus import TextOptions
    from headwise.studies.optuna_storage import OptunaOptions
    from headwise.studies.space import Setting, Space
    from headwise.studies.study import study
    from headwise.studies.study_result import Study
    from headwise.studies.text_study import study_texts
    from headwise.studies.training import Recipe

__version__ = "0.1.0"

_LAZY = {
    "Ablation": "headwise.analysis.ablation_result",
    "AblationScores": "headwise.compression.scores.measured",
    "Agreement": "headwise.analysis.importance.agreement",
    "Alarm": "headwise.monitoring.alarms",
    "AlarmLimits": "headwise.monitoring.alarms",
    "AttentionDistances": "headwise.analysis.curves.distance_table",
    "Attribution": "headwise.analysis.attribution",
    "AttributionPatching": "headwise.analysis.patching.table",
    "CircuitScores": "headwise.analysis.circuits.scores",
    "Circuits": "headwise.analysis.circuits.circuits",
    "ClippedHead": "headwise.monitoring.qk_clip",
    "Composition": "headwise.analysis.circuits.composition_table",
    "CompressionReport": "headwise.compression.report.report_result",
    "DependencyAccuracy": "headwise.analysis.head_tests.dependency_table",
    "DependencyHeads": "headwise.analysis.head_tests.dependency_table",
    "DistanceCurve": "headwise.analysis.curves.distance_table",
    "EmbeddingDistance": "headwise.analysis.losses",
    "FactoredMatrix": "headwise.analysis.circuits.factored",
    "Focus": "headwise.analysis.focus",
    "History": "headwise.monitoring.history",
    "Importance": "headwise.analysis.importance.importance",
    "ImportanceScores": "headwise.compression.scores.measured",
    "InContextScores": "headwise.analysis.in_context.table",
    "LeastSquaresScores": "headwise.compression.scores.least_squares",
    "LightningMonitor": "headwise.monitoring.lightning_callback",
    "MagnitudeScores": "headwise.compression.scores.magnitude",
    "MaskedTokenLoss": "headwise.analysis.losses",
    "Monitor": "headwise.monitoring.monitor",
    "MonitorCallback": "headwise.monitoring.trainer_callback",
    "NameMovers": "headwise.analysis.head_tests.name_mover_table",
    "Needle": "headwise.analysis.head_tests.haystacks",
    "NormWeighted": "headwise.analysis.flow.norm_table",
    "OptunaOptions": "headwise.studies.optuna_storage",
    "Patching": "headwise.analysis.patching.table",
    "PathPatching": "headwise.analysis.patching.table",
    "PositionCurves": "headwise.analysis.curves.position_table",
    "PositionSlopes": "headwise.analysis.curves.position_table",
    "Profile": "headwise.analysis.profile",
    "PruningCurve": "headwise.analysis.pruning_curve_table",
    "PruningPlan": "headwise.compression.pruning.pruning_plan",
    "Recipe": "headwise.studies.training",
    "RecipeResult": "headwise.compression.recipe.recipe_result",
    "Redundancy": "headwise.analysis.redundancy.result",
    "Retrieval": "headwise.analysis.head_tests.retrieval",
    "Rollout": "headwise.analysis.flow.rollout_table",
    "RolloutLayers": "headwise.analysis.flow.rollout_table",
    "SetAblation": "headwise.analysis.ablation_result",
    "Setting": "headwise.studies.space",
    "SinkRate": "headwise.analysis.head_tests.sinks",
    "Space": "headwise.studies.space",
    "StreamingHeads": "headwise.compression.streaming.streaming_heads",
    "Study": "headwise.studies.study_result",
    "StudyBudget": "headwise.studies.budget",
    "TextOptions": "headwise.studies.corpus",
    "Texts": "headwise.data.texts",
    "TokenRollout": "headwise.analysis.flow.token_rollout",
    "View": "headwise.analysis.view_result",
    "ViewSet": "headwise.analysis.view_set",
    "ablate": "headwise.analysis.ablate",
    "activation_patching": "headwise.analysis.patching.activation_patching",
    "agreement": "headwise.analysis.importance.agreement",
    "attention_distances": "headwise.analysis.curves.attention_distances",
    "attribution_patching": "headwise.analysis.patching.attribution_patching",
    "circuits": "headwise.analysis.circuits.circuits",
    "compare": "headwise.analysis.compare",
    "compress": "headwise.compression.recipe.compress",
    "compression_report": "headwise.compression.report.compression_report",
    "dependency_accuracy": "headwise.analysis.head_tests.dependencies",
    "gate": "headwise.analysis.gate",
    "heal": "headwise.compression.healing.heal",
    "importance": "headwise.analysis.importance.importance",
    "in_context_score": "headwise.analysis.in_context.in_context_score",
    "load": "headwise.data.models",
    "load_profile": "headwise.analysis.profile",
    "localize": "headwise.compression.streaming.localize",
    "logit_attribution": "headwise.analysis.attribution",
    "merge_kv": "headwise.compression.merging.merge_kv",
    "monitor": "headwise.monitoring.monitor",
    "name_movers": "headwise.analysis.head_tests.name_movers",
    "next_token_loss": "headwise.analysis.losses",
    "norm_weighted": "headwise.analysis.flow.norm_weighted",
    "patch_together": "headwise.analysis.patching.activation_patching",
    "patching_prompts": "headwise.analysis.patching.prompts",
    "path_patching": "headwise.analysis.patching.path_patching",
    "plan_pruning": "headwise.compression.pruning.plan_pruning",
    "position_curves": "headwise.analysis.curves.position_curves",
    "profile": "headwise.analysis.profile",
    "prune": "headwise.compression.pruning.prune",
    "pruning_curve": "headwise.analysis.pruning_curve",
    "qk_clip": "headwise.monitoring.qk_clip",
    "random_repeats": "headwise.data.random_repeats",
    "record_outputs": "headwise.analysis.recording",
    "redundancy": "headwise.analysis.redundancy.redundancy",
    "replacements": "headwise.analysis",
    "retrieval_score": "headwise.analysis.head_tests.retrieval",
    "rollout": "headwise.analysis.flow.rollout",
    "save_model": "headwise.compression.saving",
    "sink_rate": "headwise.analysis.head_tests.sinks",
    "study": "headwise.studies.study",
    "study_texts": "headwise.studies.text_study",
    "token_rollout": "headwise.analysis.flow.token_rollout",
    "view": "headwise.analysis.view",
    "view_examples": "headwise.analysis.view_examples",
    "view_image": "headwise.analysis.view_image",
    "write_page": "headwise.analysis.page",
}
"""Module of each public name that is imported on first use."""


if not TYPE_CHECKING:  # type checkers would take any name for one that `__getattr__` imports

    def __getattr__(name: str) -> Any:
        """Import a public name of `_LAZY` on first use (PEP 562)."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = __import__(
            _LAZY[name], fromlist=[name]
        )  # as `from module import name`, which also imports a submodule
        globals()[name] = getattr(module, name)
        return globals()[name]


def __dir__() -> list[str]:
    """List every public name, imported or not."""
    return sorted({*globals(), *__all__})


__all__ = [
    "ALiBi",
    "Ablation",
    "AblationScores",
    "Acceleration",
    "Agreement",
    "Alarm",
    "AlarmLimits",
    "AttentionDistances",
    "Attribution",
    "AttributionPatching",
    "Blockwise",
    "Cache",
    "CircuitScores",
    "Circuits",
    "ClippedHead",
    "Composition",
    "CompressionReport",
    "DependencyAccuracy",
    "DependencyHeads",
    "DifferentialAttention",
    "DistanceCurve",
    "DynamicCache",
    "DynamicNTK",
    "EmbeddingDistance",
    "FactoredMatrix",
    "Flex",
    "Focus",
    "HeadwiseError",
    "History",
    "Importance",
    "ImportanceScores",
    "InContextScores",
    "InputError",
    "LatentAttention",
    "LeastSquaresScores",
    "LightningMonitor",
    "LinearScaling",
    "Llama3",
    "MagnitudeScores",
    "Mask",
    "MaskedTokenLoss",
    "MissingExtra",
    "Monitor",
    "MonitorCallback",
    "MultiHeadAttention",
    "NameMovers",
    "Needle",
    "NormWeighted",
    "OptunaOptions",
    "Patching",
    "PathPatching",
    "PositionBias",
    "PositionCurves",
    "PositionSlopes",
    "Profile",
    "ProjectedContext",
    "PruningCurve",
    "PruningPlan",
    "QKNorm",
    "Recipe",
    "RecipeResult",
    "Redundancy",
    "RelativeBias",
    "Retrieval",
    "Rollout",
    "RolloutLayers",
    "Rotary",
    "Scores",
    "SetAblation",
    "Setting",
    "SinkRate",
    "Site",
    "SlidingCache",
    "Space",
    "StaticCache",
    "StreamingHeads",
    "Study",
    "StudyBudget",
    "TextOptions",
    "Texts",
    "TokenRollout",
    "View",
    "ViewSet",
    "WeightCapture",
    "YaRN",
    "ablate",
    "accelerate",
    "activation_patching",
    "agreement",
    "attend",
    "attention_distances",
    "attribution_patching",
    "causal",
    "chunked",
    "circuits",
    "compare",
    "compress",
    "compression_report",
    "dense",
    "dependency_accuracy",
    "explain",
    "explain_linear",
    "from_heads",
    "from_projections",
    "from_torch",
    "from_transformers",
    "fuse_projections",
    "gate",
    "heal",
    "importance",
    "in_context_score",
    "load",
    "load_profile",
    "localize",
    "logit_attribution",
    "mask_rule",
    "merge_kv",
    "monitor",
    "name_movers",
    "next_token_loss",
    "norm_weighted",
    "padding",
    "patch_together",
    "patching_prompts",
    "path_patching",
    "per_head",
    "plan_pruning",
    "position_curves",
    "prefix",
    "profile",
    "prune",
    "pruning_curve",
    "qk_clip",
    "random_repeats",
    "record_outputs",
    "redundancy",
    "replacements",
    "retrieval_score",
    "rollout",
    "save_model",
    "segments",
    "separate_projections",
    "sink_rate",
    "study",
    "study_texts",
    "to_heads",
    "to_projections",
    "to_torch",
    "to_transformers",
    "token_rollout",
    "view",
    "view_examples",
    "view_image",
    "watch",
    "why_not",
    "window",
    "write_page",
]
