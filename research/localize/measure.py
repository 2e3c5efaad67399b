"""Measures how much of the cache streaming heads save on SmolLM2, and what this costs.

    python -m research.localize.measure WINDOW ... [--tokens 8192] [--budget 0.01] [--folder FOLDER]

Heads are chosen on sources of Python's standard library, and the loss is reported on other sources, one text each.
Prints one JSON line for each window, and writes the streaming heads to the folder.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch

import headwise as hw

SELECTION = ("argparse.py", "ast.py", "asyncio/base_events.py")
REPORT = ("tarfile.py", "statistics.py", "zipimport.py")


def text_of(tokenizer, names: tuple[str, ...], tokens: int) -> dict[str, torch.Tensor]:
    """Return a batch with the first tokens of some sources of the standard library, one after the other."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join((library / name).read_text(encoding="utf-8") for name in names)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]
    assert ids.shape[1] == tokens, "the sources are too short"
    return {"input_ids": ids}


def main() -> None:
    """Measure each window."""
    parser = argparse.ArgumentParser()
    parser.add_argument("windows", nargs="+", type=int)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=0.01)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    model, tokenizer = hw.load("smollm2", "causal")
    texts = [text_of(tokenizer, names, options.tokens) for names in (SELECTION, REPORT)]
    for window in options.windows:
        start = time.perf_counter()
        streaming = hw.localize(model, texts, options.budget, window=window)
        sizes = streaming.cache_bytes(options.tokens)
        line = {
            "window": window,
            "tokens": options.tokens,
            "streaming": streaming.streaming_kv_heads,
            "kv_heads": streaming.kv_heads,
            "saved": round(sizes.saved, 4),
            "selection_losses": streaming.selection_losses,
            "losses": streaming.losses,
            "rise": round(streaming.loss_rise, 5),
            "seconds": round(time.perf_counter() - start),
        }
        print(json.dumps(line), flush=True)
        streaming.save(options.folder / f"streaming-{window}.json")


if __name__ == "__main__":
    main()
