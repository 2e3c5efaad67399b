"""Draw scenes of coloured shapes, with questions, answers, and the place of every shape that a word names.

python examples/captioner/scenes.py SPLIT NUMBER PICTURE

This writes the picture of a scene, and prints its questions, its answers, and the place of each shape as `--region` of
`headwise view` takes it. A scene is determined by its split and its number: `draw("test", 7)` always returns the same
scene.
"""

import argparse
import itertools
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIDE = 96
"""Width and height of a picture in pixels."""

COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 80, 215),
    "yellow": (235, 205, 40),
    "purple": (140, 50, 170),
    "black": (40, 40, 45),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
RELATIONS = ("left of", "right of", "above", "below")
KINDS = (*RELATIONS, "colour", "shape", "caption")
"""Kinds of questions. A question of a kind in `RELATIONS` asks which shape is there, seen from another one."""

SPLITS = ("train", "validation", "test")

STEP = 4
"""Edges of all boxes are multiples of this number of pixels, which lets a small model learn from few scenes."""

SIZES = (16, 20, 24)
"""Possible sides of a shape's box in pixels."""

GAP = 4
"""Least distance between the boxes of two shapes, horizontally or vertically, in pixels."""

CLEAR = 0.75
"""Largest ratio of the smaller to the larger of the distances between two centres along x and y, for which one shape
counts as left of, right of, above or below the other. Between this ratio and 1, the relation is unclear.
"""

SUPERSAMPLING = 3


@dataclass(frozen=True)
class Shape:
    """A coloured shape, with its box in pixels: left, top, right, bottom, the last two excluded."""

    colour: str
    name: str
    box: tuple[int, int, int, int]

    @property
    def centre(self) -> tuple[float, float]:
        """Return x and y of the middle of the box."""
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2

    def __str__(self) -> str:
        return f"{self.colour} {self.name}"


@dataclass(frozen=True)
class Question:
    """A question about a scene, with its only right answer.

    Attributes:
        kind: one of `KINDS`.
        text: the question.
        answer: the answer.
        asked: index of the shape that the question names by colour and name, or None.
        answered: indices of the shapes that the answer names by colour and name, in the order of the answer.
    """

    kind: str
    text: str
    answer: str
    asked: int | None
    answered: tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """A picture with its shapes, and every question that has exactly one answer."""

    picture: Image.Image
    shapes: tuple[Shape, ...]
    questions: tuple[Question, ...]


def draw(split: str, number: int) -> Scene:
    """Return the scene of a split with this number."""
    random = np.random.default_rng((SPLITS.index(split), number))
    shapes: tuple[Shape, ...] = ()
    while not shapes:
        shapes = arrange(random, count=int(random.integers(3, 6)))
    return Scene(paint(random, shapes), shapes, tuple(questions(shapes)))


def arrange(random: np.random.Generator, count: int) -> tuple[Shape, ...]:
    """Return different shapes at random places, or an empty tuple if one of them found no free place."""
    shapes: list[Shape] = []
    for kind in random.choice(len(COLOURS) * len(SHAPES), count, replace=False):
        colour, name = list(COLOURS)[kind // len(SHAPES)], SHAPES[kind % len(SHAPES)]
        for _ in range(30):
            size = int(random.choice(SIZES))
            left, top = (STEP * int(place) for place in random.integers(0, (SIDE - size) // STEP + 1, 2))
            shape = Shape(colour, name, (left, top, left + size, top + size))
            if not any(overlap(shape.box, other.box) for other in shapes):
                shapes.append(shape)
                break
    return tuple(shapes) if len(shapes) == count else ()


def overlap(box: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> bool:
    """Return True if two boxes overlap, or are closer than `GAP` along both axes."""
    return all(box[axis] < other[axis + 2] + GAP and other[axis] < box[axis + 2] + GAP for axis in (0, 1))


def paint(random: np.random.Generator, shapes: tuple[Shape, ...]) -> Image.Image:
    """Return a picture of shapes, with slightly varied colours, on a light and slightly noisy background."""
    background = random.integers(205, 256) + random.integers(-8, 9, 3)
    large = Image.new(
        "RGB", (SIDE * SUPERSAMPLING, SIDE * SUPERSAMPLING), tuple(int(c) for c in background.clip(0, 255))
    )
    canvas = ImageDraw.Draw(large)
    for shape in shapes:
        colour = np.array(COLOURS[shape.colour]) + random.integers(-15, 16, 3)
        fill = tuple(int(channel) for channel in colour.clip(0, 255))
        left, top, right, bottom = (edge * SUPERSAMPLING for edge in shape.box)
        size = right - left
        if shape.name == "circle":
            canvas.ellipse((left, top, right - 1, bottom - 1), fill=fill)
        elif shape.name == "square":
            canvas.rectangle((left, top, right - 1, bottom - 1), fill=fill)
        else:
            canvas.polygon([(left + x * (size - 1), top + y * (size - 1)) for x, y in OUTLINES[shape.name]], fill=fill)
    pixels = np.asarray(large.reduce(SUPERSAMPLING), dtype=np.float32)
    noise = random.normal(0, random.uniform(0, 8), pixels.shape)
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


def star_outline() -> list[tuple[float, float]]:
    """Return the corners of a star with five points, stretched to a box of side 1."""
    angles = [math.pi * (step / 5 - 0.5) for step in range(10)]
    corners = [(r * math.cos(a), r * math.sin(a)) for a, r in zip(angles, itertools.cycle((1, 0.42)))]
    (left, right), (top, bottom) = ((min(axis), max(axis)) for axis in zip(*corners, strict=True))
    return [((x - left) / (right - left), (y - top) / (bottom - top)) for x, y in corners]


BAR = (0.33, 0.67)
OUTLINES = {
    "triangle": [(0.5, 0), (1, 1), (0, 1)],
    "star": star_outline(),
    "cross": [
        *((BAR[0], 0), (BAR[1], 0), (BAR[1], BAR[0]), (1, BAR[0]), (1, BAR[1]), (BAR[1], BAR[1])),
        *((BAR[1], 1), (BAR[0], 1), (BAR[0], BAR[1]), (0, BAR[1]), (0, BAR[0]), (BAR[0], BAR[0])),
    ],
}
"""Corners of the shapes that are polygons, in a box of side 1."""


def relation(shape: Shape, other: Shape) -> str | None:
    """Return the relation of a shape to another one, or None if it is unclear."""
    (x, y), (other_x, other_y) = shape.centre, other.centre
    across, down = x - other_x, y - other_y
    if abs(down) <= CLEAR * abs(across):
        return "left of" if across < 0 else "right of"
    if abs(across) <= CLEAR * abs(down):
        return "above" if down < 0 else "below"
    return None


def questions(shapes: tuple[Shape, ...]) -> list[Question]:
    """Return every question that has exactly one answer. A shape whose relation to the named shape is unclear makes the
    questions about both directions between which it lies ambiguous.
    """
    result = []
    for index, shape in enumerate(shapes):
        for name in RELATIONS:
            answers = [other for other in range(len(shapes)) if other != index and could_be(name, shapes[other], shape)]
            if len(answers) == 1 and relation(shapes[answers[0]], shape) == name:
                answer = f"a {shapes[answers[0]]}"
                result.append(Question(name, f"What is {name} the {shape}?", answer, index, (answers[0],)))
        if [other.name for other in shapes].count(shape.name) == 1:
            result.append(Question("colour", f"What colour is the {shape.name}?", shape.colour, None, ()))
        if [other.colour for other in shapes].count(shape.colour) == 1:
            result.append(Question("shape", f"What shape is {shape.colour}?", f"a {shape.name}", None, ()))
    order = sorted(range(len(shapes)), key=lambda index: shapes[index].centre[0])
    if all(shapes[right].centre[0] - shapes[left].centre[0] >= GAP for left, right in itertools.pairwise(order)):
        words = [f"a {shapes[index]}" for index in order]
        result.append(Question("caption", "Name all shapes from left to right.", ", ".join(words), None, tuple(order)))
    return result


def could_be(name: str, shape: Shape, other: Shape) -> bool:
    """Return True if a shape has a relation to another one, or if their relation is unclear and this is one of the two
    between which it lies.
    """
    (x, y), (other_x, other_y) = shape.centre, other.centre
    sides = {"left of": x < other_x, "right of": x > other_x, "above": y < other_y, "below": y > other_y}
    return sides[name] and relation(shape, other) in (name, None)


def main() -> None:
    """Write the picture of a scene, and print what it shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("split", choices=SPLITS)
    parser.add_argument("number", type=int)
    parser.add_argument("picture", help="file to write, such as scene.png")
    options = parser.parse_args()
    scene = draw(options.split, options.number)
    scene.picture.save(options.picture)
    for question in scene.questions:
        print(f"{question.text} {question.answer}")
    for shape in scene.shapes:
        print(f"{shape}: {','.join(f'{100 * edge / SIDE:.0f}' for edge in shape.box)}")


if __name__ == "__main__":
    main()
