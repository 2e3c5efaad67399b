"""Train a small vision-language model of the LLaVA type on drawn scenes, and measure it on scenes that it has not seen.

python examples/captioner/train.py --out DIR [--steps N] [--seed N]

First the vision tower learns to name the colour and the shape that it sees in each patch, and the row and column of the
patch; then the whole model learns to answer questions about scenes (LLaVA: Liu et al. 2023, arXiv:2304.08485, trains in
two stages too). The folder loads offline with `LlavaForConditionalGeneration.from_pretrained(DIR)` and
`AutoProcessor.from_pretrained(DIR)`.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Threads that wait without work leave the processor to others; this has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import scenes
import tokenizers
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Settings:
    """All settings of the model and its training."""

    seed: int = 0
    # the model
    patch: int = 8
    tower_layers: int = 3
    tower_width: int = 128
    tower_heads: int = 4
    decoder_layers: int = 4
    decoder_width: int = 128
    decoder_heads: int = 8
    expansion: int = 2
    # both stages of the training
    scenes: int = 16
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    # first the tower alone
    tower_steps: int = 500
    tower_learning_rate: float = 3e-3
    # then the whole model
    steps: int = 2500
    learning_rate: float = 1e-3

    @property
    def side(self) -> int:
        """Return the number of patches along each side of a picture."""
        return scenes.SIDE // self.patch


SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
IMAGE = "<image>"
CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}"
    "{% if message['role'] == 'user' %}{{ '<image> ' }}{% endif %}{{ message['content'] + ' ' }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image> ' }}{% else %}{{ part['text'] + ' ' }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""Chat template: a question that is plain text follows the picture."""


def build_processor(settings: Settings) -> transformers.LlavaProcessor:
    """Return the processor: a tokenizer of the words of `scenes`, and an image processor of its pictures."""
    sentences = ["user: assistant:", "What is the?", "What colour is the?", "What shape is a?", *scenes.RELATIONS]
    sentences += ["Name all shapes from left to right.,", *scenes.COLOURS, *scenes.SHAPES]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token=SPECIAL["unk_token"]))
    words.normalizer = tokenizers.normalizers.Lowercase()
    words.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    words.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=[*SPECIAL.values(), IMAGE], show_progress=False)
    words.train_from_iterator(sentences, trainer)
    start = SPECIAL["bos_token"]
    words.post_processor = tokenizers.processors.TemplateProcessing(
        f"{start} $A", None, [(start, words.token_to_id(start))]
    )
    size = {"height": scenes.SIDE, "width": scenes.SIDE}
    return transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(
            size=size, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3, crop_size=size
        ),
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, padding_side="left", extra_special_tokens={"image_token": IMAGE}, **SPECIAL
        ),
        patch_size=settings.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )


def build_model(
    settings: Settings, processor: transformers.LlavaProcessor
) -> transformers.LlavaForConditionalGeneration:
    """Return the model with random weights: a CLIP vision tower, a projector and a Llama decoder."""
    words = processor.tokenizer
    vision = transformers.CLIPVisionConfig(
        image_size=scenes.SIDE,
        patch_size=settings.patch,
        hidden_size=settings.tower_width,
        intermediate_size=settings.expansion * settings.tower_width,
        num_hidden_layers=settings.tower_layers,
        num_attention_heads=settings.tower_heads,
        hidden_act="gelu",
    )
    decoder = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=settings.decoder_width,
        intermediate_size=settings.expansion * settings.decoder_width,
        num_hidden_layers=settings.decoder_layers,
        num_attention_heads=settings.decoder_heads,
        num_key_value_heads=settings.decoder_heads,
        max_position_embeddings=512,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=decoder,
        image_token_index=words.convert_tokens_to_ids(IMAGE),
        image_seq_length=settings.side**2,
        vision_feature_layer=-1,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    return transformers.LlavaForConditionalGeneration(config)


class Batch:
    """Scenes with all their questions, packed: each scene is one sequence that starts with the picture, and every
    question with its answer sees the picture and itself, at the positions that it would have alone.
    """

    def __init__(
        self, drawn: Sequence[scenes.Scene], processor: transformers.LlavaProcessor, settings: Settings
    ) -> None:
        words = processor.tokenizer
        start = words("user: " + IMAGE * settings.side**2).input_ids
        tokens, labels, positions, questions = [], [], [], []
        for scene in drawn:
            row = [list(start), [-100] * len(start), list(range(len(start))), [0] * len(start)]
            for number, question in enumerate(scene.questions, 1):
                asked = words(f"{question.text} assistant:", add_special_tokens=False).input_ids
                answer = words(question.answer + SPECIAL["eos_token"], add_special_tokens=False).input_ids
                row[0] += asked + answer
                row[1] += [-100] * len(asked) + answer
                row[2] += range(len(start), len(start) + len(asked) + len(answer))
                row[3] += [number] * (len(asked) + len(answer))
            for column, values in zip((tokens, labels, positions, questions), row, strict=True):
                column.append(torch.tensor(values))
        self.labels = pad(labels, -100)
        self.questions = pad(questions, -1)
        same = self.questions[:, :, None] == self.questions[:, None, :]
        picture = (self.questions == 0)[:, None, :]
        self.inputs = {
            "input_ids": pad(tokens, words.pad_token_id),
            "pixel_values": pixels(drawn, processor),
            "attention_mask": (same | picture).tril()[:, None],
            "position_ids": pad(positions, 0),
        }


def pad(rows: list[Tensor], value: int) -> Tensor:
    """Return rows of different lengths as one tensor, with a value after the end of each row."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def pixels(drawn: Sequence[scenes.Scene], processor: transformers.LlavaProcessor) -> Tensor:
    """Return the pictures of scenes as the model reads them."""
    return processor.image_processor([scene.picture for scene in drawn], return_tensors="pt")["pixel_values"]


def patch_labels(drawn: Sequence[scenes.Scene], settings: Settings) -> Tensor:
    """Return colour and name of the shape in each patch, and row and column of the patch, `(scenes, patches, 4)`.
    Colours and names count from 1; they are 0 in patches of which no shape's box covers a third.
    """
    side, patch = settings.side, settings.patch
    labels = np.zeros((len(drawn), side, side, 4), dtype=np.int64)
    labels[..., 2], labels[..., 3] = np.indices((side, side))
    edges = np.arange(side) * patch
    for scene, grid in zip(drawn, labels, strict=True):
        for shape in scene.shapes:
            left, top, right, bottom = shape.box
            across = (np.minimum(right, edges + patch) - np.maximum(left, edges)).clip(0)
            down = (np.minimum(bottom, edges + patch) - np.maximum(top, edges)).clip(0)
            covered = down[:, None] * across[None, :] >= patch * patch / 3
            grid[covered, :2] = 1 + list(scenes.COLOURS).index(shape.colour), 1 + scenes.SHAPES.index(shape.name)
    return torch.from_numpy(labels.reshape(len(drawn), side * side, 4))


def updates(loss_of, parameters: list[Tensor], settings: Settings, steps: int, learning_rate: float) -> Iterator[float]:
    """Minimise `loss_of(step)`, and yield each loss: AdamW, whose learning rate rises, then falls along a cosine."""
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, min(settings.warmup, steps), steps)
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        scheduler.step()
        yield loss.item()


def training_scenes(step: int, settings: Settings) -> list[scenes.Scene]:
    """Return the scenes of a step: every step has new ones."""
    return [scenes.draw("train", step * settings.scenes + number) for number in range(settings.scenes)]


def train_tower(model: transformers.LlavaForConditionalGeneration, processor, settings: Settings) -> None:
    """Train the vision tower to name colour, shape, row and column in each patch."""
    tower = model.model.vision_tower
    sizes = (len(scenes.COLOURS) + 1, len(scenes.SHAPES) + 1, settings.side, settings.side)
    head = torch.nn.Linear(settings.tower_width, sum(sizes))
    # Patches without a shape are six times as many as those with one.
    weights = [torch.tensor([0.2] + [1.0] * (size - 1)) for size in sizes[:2]] + [None, None]
    names, right = ("colour", "name", "row", "column"), torch.zeros(len(sizes))

    def loss_of(step: int) -> Tensor:
        drawn = training_scenes(step, settings)
        labels = patch_labels(drawn, settings).flatten(0, 1)
        logits = head(tower(pixels(drawn, processor)).last_hidden_state[:, 1:]).flatten(0, 1).split(sizes, dim=-1)
        on_shapes = labels[:, 0] > 0
        for kind, part in enumerate(logits):
            right[kind] = (part.argmax(-1) == labels[:, kind])[on_shapes].float().mean()
        return sum(F.cross_entropy(part, labels[:, k], weight=weights[k]) for k, part in enumerate(logits))

    parameters = [*tower.parameters(), *head.parameters()]
    for step, loss in enumerate(
        updates(loss_of, parameters, settings, settings.tower_steps, settings.tower_learning_rate), 1
    ):
        if step % 100 == 0:
            shares = ", ".join(f"{name} {share:.2f}" for name, share in zip(names, right, strict=True))
            print(f"tower, step {step}: loss {loss:.3f}; right on patches of shapes: {shares}", flush=True)


def train(model: transformers.LlavaForConditionalGeneration, processor, settings: Settings, report_every: int) -> None:
    """Train the whole model to answer questions about scenes."""

    def loss_of(step: int) -> Tensor:
        batch = Batch(training_scenes(settings.tower_steps + step, settings), processor, settings)
        hidden = model.model(**batch.inputs).last_hidden_state[:, :-1]
        labels = batch.labels[:, 1:]
        counted = labels != -100
        return F.cross_entropy(model.lm_head(hidden[counted]), labels[counted])

    start, losses = time.perf_counter(), []
    for loss in updates(loss_of, list(model.parameters()), settings, settings.steps, settings.learning_rate):
        losses.append(loss)
        if len(losses) % report_every == 0:
            shares = accuracies(model, processor, settings, "validation", 100)
            text = ", ".join(f"{kind} {values['right']:.2f}" for kind, values in shares.items())
            mean = np.mean(losses[-report_every:])
            print(
                f"step {len(losses)}, {time.perf_counter() - start:.0f} s: loss {mean:.3f}; right: {text}", flush=True
            )


def accuracies(model, processor, settings: Settings, split: str, number: int) -> dict[str, dict[str, float]]:
    """Return, for each kind of question, how many there are and the share of answers that are right in every word."""
    right = defaultdict(list)
    model.eval()
    for start in range(0, number, 50):
        drawn = [scenes.draw(split, k) for k in range(start, min(start + 50, number))]
        batch = Batch(drawn, processor, settings)
        with torch.no_grad():
            predicted = model(**batch.inputs).logits[:, :-1].argmax(-1)
        wrong = (predicted != batch.labels[:, 1:]) & (batch.labels[:, 1:] != -100)
        for scene, row, questions in zip(drawn, wrong, batch.questions[:, 1:], strict=True):
            for k, question in enumerate(scene.questions, 1):
                right[question.kind].append(not row[questions == k].any().item())
    model.train()
    return {kind: {"questions": len(right[kind]), "right": float(np.mean(right[kind]))} for kind in scenes.KINDS}


def main() -> None:
    """Train, measure and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="steps of the whole model")
    parser.add_argument("--tower-steps", type=int, default=Settings.tower_steps, help="steps of the tower")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument(
        "--test", type=int, default=500, help="number of scenes on which the model is measured at the end"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    settings = replace(Settings(), seed=options.seed, steps=options.steps, tower_steps=options.tower_steps)
    start = time.perf_counter()
    processor = build_processor(settings)
    model = build_model(settings, processor)
    train_tower(model, processor, settings)
    train(model, processor, settings, report_every=100)
    seconds = time.perf_counter() - start
    results = accuracies(model, processor, settings, "test", options.test)
    for kind, values in results.items():
        print(f"{kind}: {values['right']:.3f} of {values['questions']} questions of test scenes right")
    model.eval().save_pretrained(options.out)
    processor.save_pretrained(options.out)
    summary = {"settings": asdict(settings), "seconds": round(seconds), "test": results}
    (options.out / "training.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
