"""Options for turning a text into training data of a study. This module does not import torch."""

from dataclasses import dataclass
from typing import Any

TASKS = ("lm", "mlm", "classify")
"""Tasks that a model can learn: predict the next token, masked tokens, or the label of a text."""


@dataclass(frozen=True)
class TextOptions:
    """Options for turning a text into training data of a study: the task to learn, the tokenizer, the number of tokens
    per sequence, and the number of sequences per batch.

    Attributes:
        task: "lm" (next token), "mlm" (masked tokens) or "classify" (label of a text).
        context: tokens per sequence; texts to classify are cut to it.
        batch: sequences per batch.
        tokenizer: a `transformers` tokenizer; by default a byte-pair tokenizer is trained on the text.
        vocabulary: number of tokens of the tokenizer that is trained.
        column: column with the text, in JSON lines, CSV and Parquet.
        label: column with the label, for "classify".

    Raises:
        InputError: unknown task, or a number that is not positive.
    """

    task: str = "lm"
    context: int = 128
    batch: int = 8
    tokenizer: Any = None
    vocabulary: int = 1024
    column: str = "text"
    label: str = "label"

    def __post_init__(self) -> None:
        from headwise.checks import require_one_of, whole_number  # imports torch

        require_one_of("task", self.task, TASKS)
        for name in ("context", "batch", "vocabulary"):
            whole_number(name, getattr(self, name), least=1)
