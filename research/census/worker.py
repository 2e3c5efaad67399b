"""Worker process of the census: reads model types, one per line, and prints a verdict for each as JSON."""

import json
import logging
import os
import sys
import warnings
from dataclasses import asdict


def main() -> None:
    """Judge the model types on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # output of models must not mix with the verdicts
    warnings.filterwarnings("ignore")
    import torch
    from transformers.utils import logging as chatter

    from research.census.judge import judge

    torch.set_num_threads(1)
    chatter.set_verbosity(logging.CRITICAL)
    for line in sys.stdin:
        answers.write(json.dumps(asdict(judge(line.strip()))) + "\n")


if __name__ == "__main__":
    main()
