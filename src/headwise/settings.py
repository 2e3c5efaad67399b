"""Names that settings accept, and default values, for code that must not import torch, such as the help of commands.

The module of each analysis imports its own names and values from here.
"""

from typing import Literal

LOSSES = {"next-token": "causal", "masked-token": "masked", "embedding": None}
"""Losses of the command line, with the language-model head that each needs: causal, masked, or none."""

DTYPES = ("float32", "float16", "bfloat16", "float64")
"""Data types of weights that the command line accepts."""

FOCUS_KINDS = ("received", "exchanged")
"""Attention that `View.find` ranks heads by: what words receive from others, or exchange."""

UNIT_KINDS = ("heads", "layers", "groups")
"""Units that `ablate` removes at a time; a group is the heads that share keys and values."""

IMPORTANCE_METHODS = ("gradient", "square", "integrated", "hard_concrete", "ablation")
"""Methods of `importance`."""

IN_CONTEXT_REPLACEMENTS = ("zero", "mean")
"""Replacements of head outputs in `in_context_score`."""

COMPOSITION_KINDS = ("q", "k", "v")
"""Kinds of composition: the input of the later head that reads from the earlier one."""

PATCH_DIRECTIONS = ("denoise", "noise")
"""Directions of patching: into the run on the corrupted prompts, or into the run on the clean ones."""

MLP_MODES = ("recompute", "freeze")
"""What MLPs do along the paths of `path_patching`."""

ROW_STATISTICS = (
    *("entropy", "evenness", "confidence", "confidence_content", "distance", "self", "previous", "next", "first"),
    *("special", "duplicate", "induction", "output_norm", "written_norm"),
)
"""Statistics that have a value for each query row."""

NORMED_STATISTICS = tuple(name for name in ROW_STATISTICS if name not in ("output_norm", "written_norm"))
"""Statistics of weights that are computed from norms too."""

ROLLOUT_STATISTICS = ("first", "self", "special", "distance")
"""Statistics of a head's attention, rolled out and direct."""

ROLLOUT_RESIDUAL = 0.5
"""Share of the residual connection in Abnar and Zuidema, section 4."""

SINK_EPSILON = 0.3
"""Threshold of the attention sink in Gu et al. 2024."""

NEEDLE_LENGTHS, NEEDLE_DEPTHS, NEEDLES = (256, 512), (0.1, 0.5, 0.9), 12
"""Defaults of `retrieval_score`: numbers of tokens, shares of the text before the needle, and number of needles."""

CONTINUATIONS = ("generated", "forced")
"""Whether the model generates its answers in `retrieval_score`, or reads the right ones."""

FEWEST_PAIRS = 20
"""Default least number of pairs of a relation in each half in `dependency_accuracy`."""

NAME_PROMPTS, COPIED_PROMPTS = 96, 32
"""Defaults of `name_movers`: numbers of prompts, and of those whose names are copied by the matrices of heads."""

CONSTRAINTS = ("uniform", "groups", "free")
"""Constraints on the numbers of heads that remain in a pruned model."""

PRUNING_SCORES = ("least-squares", "magnitude", "importance", "ablation")
"""Scores that decide which heads remain in a pruned model."""

MergeMethod = Literal["mean", "weighted_mean", "procrustes"]
"""Way in which several key/value heads become one."""

MergeGrouping = Literal["adjacent", "similarity"]
"""Choice of the key/value heads that become one."""
