"""Measure which attention heads of the trained model point at the shape that a word names.

python examples/captioner/point.py DIR [--out results.json]

The program that draws the pictures knows the box of every shape, so that a head's attention can be compared with it.
For a word that names a shape, a head *points* at the shape if, among all patches of the picture, the patch with the
largest attention weight lies in the shape's box: the centre of the patch is in the box, enlarged by half a patch on
each side. The *chance* is the share of patches of which this is true.

Words are tested in six roles: the colour and the name of the shape in a question such as "What is left of the red
circle?", and, in an answer such as "a blue square", the word before the colour (its token predicts the colour), the
colour (its token predicts the name) and the name. Answers that name all shapes have roles of their own ("caption").
The model reads the right answer, also where it would give another one.

The same is measured for maps of relevance (`headwise.relevance`) of the colour and the name in answers to questions
about the place of a shape: gradient-weighted attention, rollout, and occlusion of patches, with their mean agreement.

For each head and role, a one-sided paired t-test compares the scenes' accuracies with the scenes' chances; the p-values
of all heads and roles are corrected by Holm's method. Heads are chosen on scenes of the validation split, and measured
on scenes of the test split. Intervals are 95 % bootstrap intervals over scenes.
"""

import argparse
import datetime
import json
import platform
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scenes
import scipy
import torch
import transformers
from statsmodels.stats.multitest import multipletests

import headwise as hw
from headwise.analysis.flow.relevance import mean_agreement

RESAMPLES = 5000


def words_of(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, which are its tokens."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def named_shapes(question: scenes.Question) -> Iterator[tuple[str, int, int]]:
    """Yield role, index and shape of each word of "question assistant: answer" that names a shape, or precedes one."""
    asked, answer = words_of(question.text), words_of(question.answer)
    if question.asked is not None:
        colour = asked.index("the") + 1
        yield "question, colour", colour, question.asked
        yield "question, name", colour + 1, question.asked
    kind = "caption" if question.kind == "caption" else "answer"
    articles = [place for place, word in enumerate(answer) if word == "a"]
    for place, shape in zip(articles, question.answered, strict=bool(question.answered)):
        first = len(asked) + 2 + place
        yield f"{kind}, before the colour", first, shape
        yield f"{kind}, colour", first + 1, shape
        yield f"{kind}, name", first + 2, shape


def in_box(shape: scenes.Shape, patch: int) -> np.ndarray:
    """Return which patches count as the shape's: their centres are in its box, enlarged by half a patch."""
    centres = np.arange(scenes.SIDE // patch) * patch + patch / 2
    left, top, right, bottom = shape.box
    across = (centres >= left - patch / 2) & (centres <= right + patch / 2)
    down = (centres >= top - patch / 2) & (centres <= bottom + patch / 2)
    return (down[:, None] & across[None, :]).ravel()


def measure(model, processor, split: str, number: int) -> dict[str, dict[int, list]]:
    """Return, for each role and each scene, one entry per word: hits of all heads `(layers, heads)`, the same for hits
    of any shape of the scene, and chance.
    """
    patch = processor.patch_size
    by_length = defaultdict(list)
    for scene_number in range(number):
        scene = scenes.draw(split, scene_number)
        for question in scene.questions:
            if question.kind in scenes.RELATIONS or question.kind == "caption":
                text = f"{question.text} assistant: {question.answer}"
                by_length[len(words_of(text))].append((scene_number, scene, question, text))
    results: dict[str, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    layers = [f"model.language_model.layers.{n}.self_attn" for n in range(model.config.text_config.num_hidden_layers)]
    for length, examples in by_length.items():
        # The rows count from the end: they are those of the question and the answer.
        capture = hw.WeightCapture(rows=list(range(-length, 0)))
        for start in range(0, len(examples), 50):
            part = examples[start : start + 50]
            inputs = processor(
                text=[f"user: {processor.image_token} {text}" for *_, text in part],
                images=[scene.picture for _, scene, *_ in part],
                return_tensors="pt",
            )
            patches = (inputs["input_ids"][0] == processor.image_token_id).nonzero()[:, 0]
            with torch.no_grad(), hw.watch(model, detail=capture) as heads:
                model(**inputs)
            weights = torch.stack([heads.details[path].rows for path in layers], 1)[..., patches]
            strongest = weights.argmax(-1).numpy()  # (examples, layers, heads, words)
            for (scene_number, scene, question, _), places in zip(part, strongest, strict=True):
                boxes = np.stack([in_box(shape, patch) for shape in scene.shapes])
                for role, word, shape in named_shapes(question):
                    place = places[..., word]
                    entry = (boxes[shape][place], boxes.any(0)[place], boxes[shape].mean())
                    results[role][scene_number].append(entry)
    return results


MAPS = ("gradient-weighted attention", "attention rollout", "occlusion")


def measure_maps(model, processor, split: str, number: int) -> tuple[dict[str, list[dict[str, bool]]], dict[str, list]]:
    """Return, for the colour and for the name in an answer about the place of a shape, one entry per scene with hits of
    each map of relevance; and the results of `headwise.relevance` by the same roles.
    """
    hits: dict[str, list[dict[str, bool]]] = defaultdict(list)
    results: dict[str, list] = defaultdict(list)
    for scene_number in range(number):
        scene = scenes.draw(split, scene_number)
        question = next((each for each in scene.questions if each.kind in scenes.RELATIONS), None)
        if question is None:
            continue
        text = f"user: {processor.image_token} {question.text} assistant: {question.answer}"
        seen = hw.view(model, processor, text, images=scene.picture)
        last = len(seen.words) - 1  # "a blue square": the colour is the last word but one
        maps = hw.relevance(model, seen, [last - 1, last], methods=MAPS, steps=0, batch_size=16)
        box = in_box(scene.shapes[question.answered[0]], processor.patch_size)
        for role, result in zip(("colour", "name"), maps, strict=True):
            # The patches are in the order of rows and columns, as the boxes are.
            values = {name: result.of(name).values[list(result.patches)] for name in MAPS}
            hits[role].append({name: bool(box[int(each.argmax())]) for name, each in values.items()})
            hits[role][-1]["chance"] = float(box.mean())
            results[role].append(result)
    return hits, results


def summarise(entries: dict[int, list]) -> dict[str, np.ndarray]:
    """Return accuracy, accuracy for any shape, and chance of each scene: arrays `(scenes, layers, heads)`."""
    columns = [[np.mean([entry[k] for entry in words], axis=0) for words in entries.values()] for k in range(3)]
    return {"accuracy": np.stack(columns[0]), "any shape": np.stack(columns[1]), "chance": np.array(columns[2])}


def results_of_heads(chosen_on: dict[str, dict], tested_on: dict[str, dict], random: np.random.Generator) -> dict:
    """Return for each role the accuracy of every head, its interval and its corrected p-value, and the chosen head."""
    p_values = {}
    for role, values in tested_on.items():
        gains = values["accuracy"] - values["chance"][:, None, None]
        p_values[role] = scipy.stats.ttest_1samp(gains, 0, alternative="greater").pvalue
    stacked = np.nan_to_num(np.stack(list(p_values.values())), nan=1.0)
    corrected = multipletests(stacked.ravel(), method="holm")[1].reshape(stacked.shape)
    roles = {}
    for (role, values), p_holm in zip(tested_on.items(), corrected, strict=True):
        rows = []
        for layer, head in np.ndindex(p_holm.shape):
            accuracy = values["accuracy"][:, layer, head]
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    **estimate(accuracy, random),
                    "any_shape": round(float(values["any shape"][:, layer, head].mean()), 4),
                    "p": float(p_values[role][layer, head]),
                    "p_holm": float(p_holm[layer, head]),
                }
            )
        best = np.unravel_index(chosen_on[role]["accuracy"].mean(0).argmax(), p_holm.shape)
        roles[role] = {
            "chance": round(float(values["chance"].mean()), 4),
            "scenes": len(values["chance"]),
            "chosen": next(row for row in rows if (row["layer"], row["head"]) == best),
            "heads": rows,
        }
    return roles


def results_of_maps(hits: dict[str, list[dict]], results: dict[str, list], random: np.random.Generator) -> dict:
    """Return for each role the accuracy of each map of relevance, its interval, and its agreement with occlusion."""
    maps: dict[str, dict] = {}
    for role, of_role in hits.items():
        maps[role] = {"chance": round(float(np.mean([each["chance"] for each in of_role])), 4), "scenes": len(of_role)}
        for name in MAPS:
            maps[role][name] = estimate(np.array([each[name] for each in of_role], dtype=float), random)
            if name != "occlusion":
                agreement = mean_agreement(results[role], name)
                maps[role][name]["agreement with occlusion"] = [round(each, 4) for each in agreement]
    return maps


def estimate(accuracies: np.ndarray, random: np.random.Generator) -> dict:
    """Return the mean accuracy over scenes, and its 95 % bootstrap interval."""
    draws = random.integers(0, len(accuracies), (RESAMPLES, len(accuracies)))
    interval = np.quantile(accuracies[draws].mean(1), (0.025, 0.975))
    return {"accuracy": round(float(accuracies.mean()), 4), "interval": interval.round(4).tolist()}


def table_of(roles: dict, maps: dict) -> str:
    """Return the results as a table."""
    lines = [
        "role                        head  accuracy  95 % interval    any shape  chance  Holm p   heads with p < 0.05"
    ]
    for role, values in roles.items():
        row, (low, high) = values["chosen"], values["chosen"]["interval"]
        significant = sum(other["p_holm"] < 0.05 for other in values["heads"])
        lines.append(
            f"{role:27} {row['layer']}.{row['head']:<5} {row['accuracy']:.3f}  {low:.3f} to {high:.3f}  "
            f"{row['any_shape']:9.3f}  {values['chance']:.3f}   {row['p_holm']:.0e}  {significant}"
        )
    for role, of_role in maps.items():
        for name in MAPS:
            low, high = of_role[name]["interval"]
            line = f"answer, {role}: {name:27} {of_role[name]['accuracy']:.3f}  {low:.3f} to {high:.3f}"
            if name != "occlusion":
                mean, low, high = of_role[name]["agreement with occlusion"]
                line += f", agreement with occlusion {mean:.2f} ({low:.2f} to {high:.2f})"
            lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Measure all heads and maps, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder that train.py wrote")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--validation", type=int, default=200, help="scenes by which heads are chosen")
    parser.add_argument("--test", type=int, default=300, help="scenes on which heads are measured")
    parser.add_argument("--maps", type=int, default=100, help="test scenes for maps of relevance")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap")
    options = parser.parse_args()
    torch.set_num_threads(2)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(options.folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(options.folder)
    chosen_on = {role: summarise(e) for role, e in measure(model, processor, "validation", options.validation).items()}
    tested_on = {role: summarise(e) for role, e in measure(model, processor, "test", options.test).items()}
    random = np.random.default_rng(options.seed)
    roles = results_of_heads(chosen_on, tested_on, random)
    maps = results_of_maps(*measure_maps(model, processor, "test", options.maps), random)
    print(table_of(roles, maps))
    if options.out:
        versions = {module.__name__: module.__version__ for module in (torch, transformers, hw)}
        result = {
            "date": datetime.date.today().isoformat(),
            "processor": processor_name(),
            "versions": versions | {"python": platform.python_version()},
            "settings": {name: value for name, value in vars(options).items() if name not in ("folder", "out")},
            "training": json.loads((options.folder / "training.json").read_text()),
            "pointing": roles,
            "maps": maps,
        }
        text = json.dumps(result, indent=1)
        text = re.sub(r"\n {4,}|\n {3}(?=[\]}])", " ", text)  # one line per head
        options.out.write_text(text + "\n")


def processor_name() -> str:
    """Return the name of the processor, as Linux has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
