"""The examples run, and the scenes of the captioner show what their questions and boxes state."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

import headwise as hw

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments) -> str:
    """Run an example, and return what it prints."""
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def scenes(monkeypatch):
    """Return the module that draws scenes."""
    monkeypatch.syspath_prepend(EXAMPLES / "captioner")
    import scenes

    return scenes


def test_scenes_have_the_shapes_of_their_boxes_and_the_answers_of_their_questions(scenes):
    asked = set()
    for number in range(30):
        scene, again = (scenes.draw("test", number) for _ in range(2))
        assert scene.shapes == again.shapes
        pixels = np.asarray(scene.picture).astype(float)
        assert (pixels == np.asarray(again.picture)).all()
        for shape in scene.shapes:
            x, y = (int(each) for each in shape.centre)
            assert np.abs(pixels[y, x] - scenes.COLOURS[shape.colour]).max() < 60
        middle = {str(shape): shape.centre for shape in scene.shapes}
        for question in scene.questions:
            asked.add(question.kind)
            if question.kind in scenes.RELATIONS:
                one = middle[question.answer.removeprefix("a ")]
                other = middle[question.text.split(" the ")[1].removesuffix("?")]
                axis, sign = scenes.RELATIONS.index(question.kind) // 2, (-1) ** scenes.RELATIONS.index(question.kind)
                apart = [sign * (other[k] - one[k]) for k in (0, 1)]
                assert apart[axis] > abs(apart[1 - axis])
            if question.kind == "caption":
                across = [middle[each.removeprefix("a ")][0] for each in question.answer.split(", ")]
                assert across == sorted(across)
    assert asked == set(scenes.KINDS)


def test_the_captioner_is_trained_viewed_and_measured(tmp_path):
    folder, picture, out = tmp_path / "captioner", tmp_path / "scene.png", tmp_path / "results.json"
    captioner = EXAMPLES / "captioner"
    run(captioner / "train.py", "--out", folder, "--steps", 2, "--tower-steps", 2, "--test", 4)
    assert "?" in run(captioner / "scenes.py", "test", 3, picture)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    seen = hw.view(model, processor, "What is left of the blue cross?", images=picture, generate=2)
    assert "what is left of the blue cross ? assistant :" in seen.text
    assert sum(patch is not None for patch in seen.texts[0].patches) == 144
    run(captioner / "point.py", folder, "--validation", 4, "--test", 4, "--maps", 2, "--out", out)
    kept = json.loads((captioner / "results.json").read_text())
    assert json.loads(out.read_text()).keys() == kept.keys()


def test_the_digits_are_trained(tmp_path):
    run(EXAMPLES / "digits.py", "--out", tmp_path, "--steps", 2)
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    assert processor.size["height"] == model.config.image_size


def test_the_diffusion_transformer_is_trained_and_measured(tmp_path):
    folder, out, picture = tmp_path / "diffusion", tmp_path / "results.json", tmp_path / "attention.png"
    few = ("--steps", 2, "--autoencoder-steps", 2, "--pool", 64, "--test", 1)
    printed = run(EXAMPLES / "diffusion.py", "--out", folder, *few)
    assert "drawn, test: colours and places right for 1.000 of 1 captions, shapes, too: 1.000" in printed
    run(
        EXAMPLES / "diffusion.py", "--check", folder, "--test", 1, "--viewed", 1, "--results", out, "--picture", picture
    )
    results, kept = json.loads(out.read_text()), json.loads((EXAMPLES / "diffusion.json").read_text())
    assert results.keys() == kept.keys()
    for role, values in results["pointing"].items():
        assert len(kept["pointing"][role]["heads"]) == 5 * len(values["heads"]) == 5 * 3 * 4
    assert picture.stat().st_size > 0
