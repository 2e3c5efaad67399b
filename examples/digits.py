"""Train a small vision transformer (ViT) on the handwritten digits that the package scikit-learn contains.

python examples/digits.py --out DIR [--steps N] [--seed N]

The folder loads offline with `ViTForImageClassification.from_pretrained(DIR)` and
`AutoImageProcessor.from_pretrained(DIR)`. The image processor reads a picture of a digit of any size, white on black.
"""

import argparse
import json
import os
import time
from pathlib import Path

# Threads that wait without work leave the processor to others; this has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional as F

SIDE, PATCH = 32, 4
TEST = 360
BATCH = 64
LEARNING_RATE = 1e-3
WARMUP = 50
SHIFT = 2
"""Training pictures are shifted by up to this number of pixels along each axis."""


def pictures() -> tuple[list[Image.Image], torch.Tensor]:
    """Return all digits as pictures of `SIDE` x `SIDE` pixels, with their labels, in a fixed random order."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    small = [Image.fromarray((image / 16 * 255).astype(np.uint8)) for image in digits.images[order]]
    large = [image.resize((SIDE, SIDE), Image.Resampling.BILINEAR).convert("RGB") for image in small]
    return large, torch.from_numpy(digits.target[order])


def main() -> None:
    """Train, measure and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(options.seed)
    images, labels = pictures()
    processor = transformers.ViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    names = {number: str(number) for number in range(10)}
    config = transformers.ViTConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.1,
        id2label=names,
        label2id={name: number for number, name in names.items()},
    )
    model = transformers.ViTForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, min(WARMUP, options.steps), options.steps)
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        chosen = torch.randint(TEST, len(labels), (BATCH,))
        down, across = torch.randint(-SHIFT, SHIFT + 1, (2,)).tolist()
        moved = F.pad(pixels[chosen], [SHIFT] * 4, value=-1)[
            :, :, SHIFT + down : SHIFT + down + SIDE, SHIFT + across : SHIFT + across + SIDE
        ]
        loss = F.cross_entropy(model(moved).logits, labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        right = (model(pixels[:TEST]).logits.argmax(-1) == labels[:TEST]).sum().item()
    print(f"{right} of {TEST} held-out digits right ({right / TEST:.1%}), after {seconds:.0f} s of training")
    model.save_pretrained(options.out)
    processor.save_pretrained(options.out)
    summary = {"steps": options.steps, "seed": options.seed, "seconds": round(seconds), "right": right, "of": TEST}
    (options.out / "training.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
