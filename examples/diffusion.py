"""Train a small diffusion transformer on drawn scenes, and measure which heads find the shape that a word names.

python examples/diffusion.py --out DIR [--steps N] [--seed N]
python examples/diffusion.py --check DIR [--results FILE] [--picture FILE]

The first command writes a pipeline of the PixArt type (Chen et al. 2023, arXiv:2310.00426), which loads offline with
`PixArtAlphaPipeline.from_pretrained(DIR)`. It draws captions such as "a red circle left of a blue square". A third of
all captions is held out: on one half of them heads and steps are chosen, and on the other half they are tested.

The second command generates a picture of each held-out caption. In every head of the cross-attention and in five steps,
`headwise.view` shows which patch attends most to a word. A head *points* at the shape of the word if at least half of
this patch's pixels have the colour of the shape in the generated picture. Chance is the share of patches for which this
is true. For each head, step and role (colour or name of a shape), a one-sided paired t-test over captions compares the
accuracy with chance; the p-values are corrected by Holm's method. Intervals are 95 % bootstrap intervals over captions.
"""

import argparse
import datetime
import functools
import itertools
import json
import os
import platform
import re
import sys
import time
from pathlib import Path

# Threads that wait without work leave the processor to others; this has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import diffusers
import matplotlib.pyplot as plt
import numpy as np
import scipy.stats
import tokenizers
import torch
import transformers
from PIL import Image
from statsmodels.stats.multitest import multipletests
from torch.nn import functional as F

import headwise as hw

sys.path.insert(0, str(Path(__file__).parent / "captioner"))
import scenes

SHAPES, RELATIONS = ("circle", "square", "triangle"), ("left of", "above")
REDUCTION, SIZE = 3, 36
"""The scenes of the captioner, with shapes of this size in pixels, are reduced by this factor to 32 x 32 pixels."""
LAYERS, HEADS, WIDTH, CHANNELS, WORDS = 3, 4, 128, 4, 10
PATCH = 4
"""Pixels along each side of a patch, which has 2 x 2 latents. Boxes of shapes consist of patches: this is easier."""
BATCH = 32
LEARNING_RATE = 2e-3
LATENT_NOISE, LATENT_PENALTY = 0.1, 1e-3
"""Noise and penalty that keep the latents of the autoencoder smooth and small."""
UNCONDITIONAL = 0.1
"""Share of captions that are replaced by an empty one, for classifier-free guidance."""
NEAR, LEAST = 75, 20
"""Largest distance of a pixel from its colour in RGB (0 to 255), and least number of pixels of a drawn colour."""
OPTIONS = {"num_inference_steps": 20, "guidance_scale": 3.0, "max_sequence_length": WORDS}
OPTIONS |= {"use_resolution_binning": False, "clean_caption": False}
RESAMPLES = 5000


def all_captions() -> dict[str, list[tuple]]:
    """Return the captions of each split. A caption is a tuple: colour, shape, relation, colour, shape."""
    pairs = itertools.permutations(scenes.COLOURS, 2)
    captions = [
        (one, shape, relation, other, other_shape)
        for (one, other), shape, relation, other_shape in itertools.product(pairs, SHAPES, RELATIONS, SHAPES)
    ]
    order = np.random.default_rng(0).permutation(len(captions))
    parts = np.split(order, [len(captions) // 6, len(captions) // 3])
    return {
        split: [captions[k] for k in part] for split, part in zip(("validation", "test", "train"), parts, strict=True)
    }


def text_of(caption: tuple) -> str:
    """Return a caption as a text."""
    return "a {} {} {} a {} {}".format(*caption)


def draw(caption: tuple, random: np.random.Generator) -> Image.Image:
    """Return a picture of a caption, with shapes at random places."""
    while True:
        shapes = []
        for colour, name in (caption[:2], caption[3:]):
            grid = REDUCTION * PATCH
            left, top = (grid * int(each) for each in random.integers(0, (scenes.SIDE - SIZE) // grid + 1, 2))
            shapes.append(scenes.Shape(colour, name, (left, top, left + SIZE, top + SIZE)))
        if scenes.relation(*shapes) == caption[2] and not scenes.overlap(shapes[0].box, shapes[1].box):
            return scenes.paint(random, tuple(shapes)).reduce(REDUCTION)


def colours_of(picture: Image.Image) -> dict[str, np.ndarray]:
    """Return the pixels of a picture that have each colour."""
    distances = np.linalg.norm(
        np.asarray(picture)[..., None, :] - np.array(list(scenes.COLOURS.values()), float), axis=-1
    )
    nearest, near = distances.argmin(-1), distances.min(-1) <= NEAR
    return {colour: near & (nearest == k) for k, colour in enumerate(scenes.COLOURS)}


def is_right(picture: Image.Image, caption: tuple) -> tuple[bool, bool]:
    """Return True if a picture has the right colours in the right places, and True if its shapes are right, too.

    Each colour of the caption has at least `LEAST` pixels, and no other colour has. From the mean place of one colour
    to that of the other, the way in the direction of the relation is longer than across. The pixels of a triangle
    spread more than those of other shapes: the root of the determinant of their covariance, divided by their number, is
    more than 0.089. Those of a square fill more than 0.89 of their bounding box.
    """
    pixels = colours_of(picture)
    if {colour for colour, each in pixels.items() if each.sum() >= LEAST} != {caption[0], caption[3]}:
        return False, False
    one, other = pixels[caption[0]], pixels[caption[3]]
    way = (np.argwhere(other).mean(0) - np.argwhere(one).mean(0))[::-1]
    axis = RELATIONS.index(caption[2])
    is_placed, names = bool(way[axis] > abs(way[1 - axis])), []
    for each in (one, other):
        spread = np.linalg.det(np.cov(np.argwhere(each).T)) ** 0.5 / each.sum()
        # A row or column with one pixel of the colour may be a blurred edge.
        rows, columns = (each.sum(1 - axis) > 1 for axis in (0, 1))
        names.append("triangle" if spread > 0.089 else "square" if each[rows][:, columns].mean() > 0.89 else "circle")
    return is_placed, is_placed and names == [caption[1], caption[4]]


def build_pipeline() -> diffusers.PixArtAlphaPipeline:
    """Return the pipeline with random weights."""
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    names = [*special.values(), "a", "of", "left", "right", "above", "below", *scenes.COLOURS, *SHAPES]
    numbers = {name: number for number, name in enumerate(names)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", None, [("</s>", numbers["</s>"])])
    text = transformers.T5Config(
        **{"vocab_size": len(names), "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "num_layers": 2},
        **{"num_heads": HEADS, "dropout_rate": 0, "pad_token_id": 0, "eos_token_id": numbers["</s>"]},
    )
    return diffusers.PixArtAlphaPipeline(
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special),
        transformers.T5EncoderModel(text),
        diffusers.AutoencoderTiny(
            encoder_block_out_channels=(32, 32),
            decoder_block_out_channels=(32, 32),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
            latent_channels=CHANNELS,
        ),
        diffusers.PixArtTransformer2DModel(
            num_attention_heads=HEADS,
            attention_head_dim=WIDTH // HEADS,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=LAYERS,
            cross_attention_dim=WIDTH,
            caption_channels=WIDTH,
            sample_size=2 * scenes.SIDE // REDUCTION // PATCH,
            patch_size=2,
        ),
        diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    )


def minimise(loss_of, parameters: list, steps: int, learning_rate: float, name: str) -> None:
    """Minimise `loss_of()` by AdamW, whose learning rate rises, then falls along a cosine."""
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, min(100, steps), steps)
    start, losses = time.perf_counter(), []
    for step in range(1, steps + 1):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step % 100 == 0:
            seconds = time.perf_counter() - start
            print(f"{name}, step {step}, {seconds:.0f} s: loss {np.mean(losses[-100:]):.4f}", flush=True)


def train(options: argparse.Namespace) -> None:
    """Train, measure and save the pipeline: first the autoencoder, then the transformer with the text encoder."""
    torch.manual_seed(options.seed)
    random, captions, start = np.random.default_rng(options.seed), all_captions(), time.perf_counter()
    pipeline = build_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    vae, transformer, encoder = pipeline.vae, pipeline.transformer, pipeline.text_encoder
    chosen = [captions["train"][k] for k in random.integers(len(captions["train"]), size=options.pool)]
    pixels = torch.from_numpy(np.stack([np.asarray(draw(caption, random)) for caption in chosen])).permute(0, 3, 1, 2)

    def autoencoder_loss() -> torch.Tensor:
        batch = pixels[torch.randint(options.pool, (BATCH,))] / 127.5 - 1
        latents = vae.encode(batch).latents
        drawn = vae.decode(latents + LATENT_NOISE * torch.randn_like(latents)).sample
        return F.mse_loss(drawn, batch) + LATENT_PENALTY * latents.square().mean()

    minimise(autoencoder_loss, list(vae.parameters()), options.autoencoder_steps, LEARNING_RATE, "autoencoder")
    vae.eval().requires_grad_(False)
    with torch.no_grad():
        latents = torch.cat([vae.encode(part / 127.5 - 1).latents for part in pixels.split(256)])
    vae.register_to_config(scaling_factor=1 / latents.std().item())
    latents *= vae.config.scaling_factor
    texts = [text_of(caption) for caption in chosen] + [""]
    tokens = pipeline.tokenizer(texts, padding="max_length", max_length=WORDS, return_tensors="pt")
    ids, mask, conditions = tokens["input_ids"], tokens["attention_mask"], {"resolution": None, "aspect_ratio": None}

    def flow_matching_loss() -> torch.Tensor:
        index = torch.randint(options.pool, (BATCH,))
        clean, noise = latents[index], torch.randn(BATCH, *latents.shape[1:])
        level = (torch.randn(BATCH) + 0.5).sigmoid()  # logit-normal, as in Esser et al. 2024, arXiv:2403.03206
        text = torch.where(torch.rand(BATCH) < UNCONDITIONAL, options.pool, index)
        noisy = torch.lerp(clean, noise, level[:, None, None, None])
        states = encoder(ids[text], attention_mask=mask[text]).last_hidden_state
        predicted = transformer(noisy, states, 1000 * level, conditions, encoder_attention_mask=mask[text]).sample
        return F.mse_loss(predicted, noise - clean)

    parameters = [*transformer.parameters(), *encoder.parameters()]
    minimise(flow_matching_loss, parameters, options.steps, LEARNING_RATE, "transformer")
    settings = ("steps", "autoencoder_steps", "pool", "seed")
    results = {name: getattr(options, name) for name in settings} | {"seconds": round(time.perf_counter() - start)}
    pipeline.save_pretrained(options.out)
    generator = torch.Generator().manual_seed(options.seed)
    test = captions["test"][: options.test]
    pictures = {
        "generated, test": pipeline([text_of(caption) for caption in test], generator=generator, **OPTIONS).images,
        "drawn, test": [draw(caption, random) for caption in test],
    }
    for name, images in pictures.items():
        placed, right = np.mean([is_right(*each) for each in zip(images, test, strict=True)], axis=0).round(4).tolist()
        results[name] = {"captions": len(test), "colours and places": placed, "shapes, too": right}
        print(f"{name}: colours and places right for {placed:.3f} of {len(test)} captions, shapes, too: {right:.3f}")
    (options.out / "training.json").write_text(json.dumps(results, indent=1) + "\n")


def views_of(
    pipeline: diffusers.PixArtAlphaPipeline, caption: tuple, seed: int, steps: int
) -> tuple[Image.Image, hw.ViewSet]:
    """Return the picture of a caption, and the views of the cross-attention in some of its steps."""
    text, generator = text_of(caption), torch.Generator()
    picture = pipeline(text, generator=generator.manual_seed(seed), **OPTIONS).images[0]
    generate = functools.partial(pipeline, generator=generator.manual_seed(seed), **OPTIONS)
    views = hw.view(pipeline.transformer, generate, text, generate=steps)
    return picture, views.select(layers={head.layer for head in views[0].heads if head.kind == "cross"})


def measure(pipeline: diffusers.PixArtAlphaPipeline, captions: list[tuple], steps: int) -> tuple[dict, tuple]:
    """Return for each role whether the heads point at the shape that a word names, and at the other shape, both as
    `(captions, steps, heads)`, and chance, `(captions)`. Values of the two words of a caption are averaged. Return also
    caption, picture and views of an example: the first one whose picture is right, if there is one.
    """
    most, example = -1, ()
    results = {role: {"accuracy": [], "other": [], "chance": []} for role in ("colour", "name")}
    for seed, caption in enumerate(captions):
        picture, views = views_of(pipeline, caption, seed, steps)
        right = sum(is_right(picture, caption))
        if right > most:
            most, example = right, (caption, picture, views)
        side = scenes.SIDE // REDUCTION // PATCH
        pixels = {name: each.reshape(side, PATCH, side, PATCH) for name, each in colours_of(picture).items()}
        inside = np.stack([pixels[caption[k]].mean((1, 3)).ravel() >= 0.5 for k in (0, 3)])
        words = [word.text for word in views[0].words]
        weights = np.stack([[head.attention.weights.weights for head in view.heads] for view in views])
        for offset, values in enumerate(results.values()):
            places = [words.index(caption[k]) + offset for k in (0, 3)]  # the name follows the colour
            strongest = weights[..., places].argmax(-2)  # (steps, heads, words)
            values["accuracy"].append(np.mean([inside[k][strongest[..., k]] for k in (0, 1)], axis=0))
            values["other"].append(np.mean([inside[1 - k][strongest[..., k]] for k in (0, 1)], axis=0))
            values["chance"].append(inside.mean())
    arrays = {role: {name: np.stack(each) for name, each in values.items()} for role, values in results.items()}
    return arrays, example


def draw_attention(caption: tuple, picture: Image.Image, views: hw.ViewSet, row: dict, path: Path) -> None:
    """Draw a generated picture, and the attention of one head from its patches to the two colours."""
    view = next(each for each in views if each.text.startswith(f"step {row['step']} of "))
    weights = view.head(row["layer"], row["head"]).attention.weights.weights
    side, words = scenes.SIDE // REDUCTION, [word.text for word in view.words]
    figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.9), layout="constrained")
    for ax, word in zip(axes, (None, caption[0], caption[3]), strict=True):
        ax.imshow(picture, extent=(0, side, side, 0))
        ax.set_axis_off()
        ax.set_title("generated picture" if word is None else f"attention to “{word}”", fontsize=10)
        if word is not None:
            received = weights[:, words.index(word)].reshape(side // PATCH, side // PATCH)
            shade = np.zeros((*received.shape, 4))
            shade[..., 3] = 0.85 * (1 - received / received.max())
            ax.imshow(shade, extent=(0, side, side, 0), interpolation="nearest")
    steps = OPTIONS["num_inference_steps"]
    figure.suptitle(
        f"{text_of(caption)}: head {row['layer']}.{row['head']} in step {row['step']} of {steps}", fontsize=11
    )
    figure.savefig(path, dpi=100)


def check(options: argparse.Namespace) -> None:
    """Measure all heads of the cross-attention, print the chosen ones, and write the results."""
    pipeline = diffusers.PixArtAlphaPipeline.from_pretrained(options.check)
    pipeline.set_progress_bar_config(disable=True)
    captions, random = all_captions(), np.random.default_rng(options.seed)
    chosen_on, _ = measure(pipeline, captions["validation"][: options.test], options.viewed)
    tested_on, (caption, picture, views) = measure(pipeline, captions["test"][: options.test], options.viewed)
    heads = [(head.layer, head.head) for head in views[0].heads]
    steps = [int(view.text.split()[1]) for view in views]
    gains = np.stack([each["accuracy"] - each["chance"][:, None, None] for each in tested_on.values()], axis=1)
    p_values = np.nan_to_num(scipy.stats.ttest_1samp(gains, 0, alternative="greater").pvalue, nan=1.0)
    corrected = multipletests(p_values.ravel(), method="holm")[1].reshape(p_values.shape)
    roles = {}
    for number, (role, values) in enumerate(tested_on.items()):
        rows = []
        for step, head in np.ndindex(len(steps), len(heads)):
            hits = values["accuracy"][:, step, head]
            resampled = hits[random.integers(0, len(hits), (RESAMPLES, len(hits)))].mean(1)
            row = {"step": steps[step], "layer": heads[head][0], "head": heads[head][1], "accuracy": hits.mean()}
            row |= {"interval": np.quantile(resampled, (0.025, 0.975)), "other": values["other"][:, step, head].mean()}
            row = {name: np.round(value, 4).tolist() for name, value in row.items()}
            rows.append(row | {"p": p_values[number, step, head], "p_holm": corrected[number, step, head]})
        by_step = [len(heads) * k + each.argmax() for k, each in enumerate(chosen_on[role]["accuracy"].mean(0))]
        best = chosen_on[role]["accuracy"].mean(0).argmax()
        chance = round(float(values["chance"].mean()), 4)
        roles[role] = {"chance": chance, "captions": len(hits), "chosen": rows[best], "heads": rows}
        significant = sum(row["p_holm"] < 0.05 for row in rows)
        print(f"{role}: chance {chance:.3f}, {significant} of {len(rows)} heads and steps with p < 0.05")
        for row in (rows[best], *(rows[each] for each in by_step)):
            low, high = row["interval"]
            print(
                f"  {'chosen' if row is rows[best] else ''} step {row['step']}, head {row['layer']}.{row['head']}: "
                f"accuracy {row['accuracy']:.3f} ({low:.3f} to {high:.3f}), other shape {row['other']:.3f}, "
                f"p {row['p_holm']:.0e}"
            )
    if options.picture:
        draw_attention(caption, picture, views, roles["colour"]["chosen"], options.picture)
    if options.results:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        versions = {module.__name__: module.__version__ for module in (torch, transformers, diffusers, hw)}
        results = {
            "date": datetime.date.today().isoformat(),
            "processor": names[0] if names else platform.processor(),
            "versions": versions | {"python": platform.python_version()},
            "training": json.loads((options.check / "training.json").read_text()),
            "pointing": roles,
        }
        # one line per head
        options.results.write_text(re.sub(r"\n {4,}|\n {3}(?=[\]}])", " ", json.dumps(results, indent=1)) + "\n")


def main() -> None:
    """Train or check the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--out", type=Path, help="folder for a trained pipeline")
    folder.add_argument("--check", type=Path, help="folder of the trained pipeline whose heads are measured")
    parser.add_argument("--results", type=Path, help="JSON file for the measured heads")
    parser.add_argument("--picture", type=Path, help="file for a picture of the best head's attention")
    parser.add_argument("--steps", type=int, default=4000, help="training steps of the transformer")
    parser.add_argument("--autoencoder-steps", type=int, default=400, help="training steps of the autoencoder")
    parser.add_argument("--pool", type=int, default=16384, help="number of training pictures")
    parser.add_argument("--test", type=int, default=60, help="captions of each split that is measured")
    parser.add_argument(
        "--viewed", type=int, default=5, help="number of measured steps, from the first to the last one"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(2)
    diffusers.utils.logging.set_verbosity_error()  # the pipeline also runs with an autoencoder that is not variational
    if options.out:
        train(options)
    else:
        check(options)


if __name__ == "__main__":
    main()
