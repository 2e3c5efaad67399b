"""Patches of pictures: the part of which picture each token of a model stands for.

A processor resizes, crops, pads and cuts pictures in its own way. Where each number of its output lies in the pictures
is read off the processor's output for pictures whose colours are their coordinates.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.token_sources import TokenStream
from headwise.errors import InputError, require
from headwise.page.contents import Patch, Picture
from headwise.shapes import Float, Int

LARGEST_SIDE = 768
"""Largest width or height in pixels of a picture that is stored for display."""

LARGEST_PNG = 150_000
"""Number of bytes up to which a picture is stored as PNG, without loss."""

WHOLE = 0.9
"""Share of the width and of the height of a picture from which on a token counts as one of the whole picture."""

LARGEST_OVERLAP = 0.1
"""Share of the smaller of two parts of a picture that may overlap with the other part if both are shown in one
picture."""

SQUARES = 3
"""Number of squares of a picture that are changed to check the places of its pixels."""

SQUARE = 0.125
"""Width and height of such a square, as a fraction of the picture."""

MARGIN = 2.0
"""Distance over which resizing mixes pixels, in pixels of the picture or of the processor's output."""

LARGEST_OUTSIDE = 0.5
"""Largest change of an element outside of the changed squares, relative to the largest one inside."""


@dataclass(frozen=True, eq=False)
class ElementPlaces:
    """Places in pictures of the elements of one input of a model.

    Attributes:
        picture: index of the picture that each element is computed from; -1 for padding.
        x, y: distance of the element from the left and from the top of the picture, as fractions of its width and
            height.
        part: number of the part (such as a tile) that the processor cut from the pictures.
    """

    picture: Int[Tensor, " elements"]
    x: Float[Tensor, " elements"]
    y: Float[Tensor, " elements"]
    part: Int[Tensor, " elements"]


def element_places(
    process: Callable[[list[Any]], Mapping[str, Any]], pictures: Sequence[Any]
) -> dict[str, ElementPlaces]:
    """Return where the elements of each floating-point output of a processor lie in the pictures, by the output's name.

    The processor reads pictures with two constant colour channels, 0 and 255, and one channel that grows from 0 to 255
    from left to right, or from top to bottom. Each channel grows once. Of the three values of an element, the middle
    one divided by the range of the three is its place, whatever the normalisation. An element whose values are all
    equal is padding.

    Args:
        process: function from pictures to the outputs of the processor.
        pictures: the pictures, `PIL.Image`.
    """
    image = require("PIL.Image", purpose="showing an image", extra="plot")

    def values_of(place: int, ramp: Any) -> list[dict[str, Tensor]]:
        outputs = []
        for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
            bands = [ramp, image.new("L", ramp.size, 0), image.new("L", ramp.size, 255)]
            changed = list(pictures)
            changed[place] = image.merge("RGB", [bands[channel] for channel in order])
            outputs.append(
                {
                    name: value
                    for name, value in process(changed).items()
                    if isinstance(value, Tensor) and value.is_floating_point()
                }
            )
        return outputs

    places: dict[str, ElementPlaces] = {}
    for number, picture in enumerate(pictures):
        width, height = picture.size
        across, down = (torch.arange(size).add(0.5).mul(255 / size).round().to(torch.uint8) for size in (width, height))
        ramps = across.expand(height, width), down[:, None].expand(height, width)
        of_axes = [values_of(number, image.fromarray(ramp.contiguous().numpy())) for ramp in ramps]
        for name, first in of_axes[0][0].items():
            ordered = [torch.stack([output[name] for output in outputs]).double().sort(0).values for outputs in of_axes]
            spread = ordered[0][2] - ordered[0][0]
            is_inside = spread > 1e-3 * spread.abs().max()
            if not bool(is_inside.any()):
                continue
            x, y = (((each[1] - each[0]) / (each[2] - each[0])).clamp(0, 1).flatten() for each in ordered)
            is_inside = is_inside.flatten()
            if name not in places:
                nothing = torch.full((first.numel(),), torch.nan, dtype=torch.float64)
                places[name] = ElementPlaces(
                    torch.full((first.numel(),), -1), nothing, nothing.clone(), _parts_of(first.shape)
                )
            places[name].picture[is_inside] = number
            places[name].x[is_inside], places[name].y[is_inside] = x[is_inside], y[is_inside]
    return places


def require_places(
    process: Callable[[list[Any]], Mapping[str, Any]],
    pictures: Sequence[Any],
    inputs: Mapping[str, Any],
    places: Mapping[str, ElementPlaces],
) -> None:
    """Raise an `InputError` if a processor places the pixels of the real pictures in another way than `places`, which
    were read off pictures of other colours, as one that crops the margins of a page does.

    Some squares of each picture become black or white. Elements whose places lie outside of the squares must not change
    much in comparison with those inside, except that a processor may scale the values of a whole picture.

    Args:
        process: function from pictures to the outputs of the processor.
        pictures: the pictures, `PIL.Image`.
        inputs: the outputs of the processor for the pictures.
        places: where the elements of the outputs lie in the pictures.
    """
    box_filter = require("PIL.Image", purpose="showing an image", extra="plot").Resampling.BOX
    generator = torch.Generator().manual_seed(0)
    for number, picture in enumerate(pictures):
        changed, boxes = picture.copy(), []
        for of_input in places.values():
            elements = (of_input.picture == number).nonzero()[:, 0]
            for _ in range(SQUARES if len(elements) else 0):
                index = elements[torch.randint(len(elements), (), generator=generator)]
                sides = []
                for place, size in zip((of_input.x[index], of_input.y[index]), picture.size, strict=True):
                    side = max(round(SQUARE * size), 1)
                    start = min(max(round(float(place) * size - side / 2), 0), size - side)
                    sides.append((start, start + side))
                (left, right), (top, bottom) = sides
                box = left, top, right, bottom
                # One colour changes all pixels of the square in one direction, so that resizing does not cancel them.
                is_bright = picture.crop(box).convert("L").resize((1, 1), box_filter).getpixel((0, 0)) > 127
                changed.paste((0, 0, 0) if is_bright else (255, 255, 255), box)
                boxes.append([edge / picture.size[axis % 2] for axis, edge in enumerate(box)])
        after = process([*pictures[:number], changed, *pictures[number + 1 :]])
        for name, of_input in places.items():
            old, new = (outputs[name].detach().double().cpu().flatten() for outputs in (inputs, after))
            is_near = torch.zeros(len(old), dtype=torch.bool)
            for part in torch.unique(of_input.part[of_input.picture == number]).tolist():
                is_of_part = (of_input.part == part) & (of_input.picture == number)
                of_part = of_input.picture.where(is_of_part, -1)
                blur_x, blur_y = (
                    MARGIN * max(_spacing(axis, of_part), 1 / size) + 1 / 255
                    for axis, size in zip((of_input.x, of_input.y), picture.size, strict=True)
                )
                for left, top, right, bottom in boxes:
                    is_in_column = (of_input.x > left - blur_x) & (of_input.x < right + blur_x)
                    is_near |= is_of_part & is_in_column & (of_input.y > top - blur_y) & (of_input.y < bottom + blur_y)
            is_far, is_fitted = ~is_near, ~is_near & (of_input.picture == number)
            change = (new - old).abs()
            if bool(is_fitted.any()):
                # A processor may divide by the standard deviation of a picture, which the squares change.
                centred, shifted = old - old[is_fitted].mean(), new - new[is_fitted].mean()
                scale = (centred * shifted)[is_fitted].sum() / centred[is_fitted].square().sum().clamp(min=1e-12)
                change = torch.minimum(change, (shifted - scale * centred).abs())
            near = float(change[is_near].max()) if bool(is_near.any()) else 0.0
            far = float(change[is_far].max()) if bool(is_far.any()) else 0.0
            if far > LARGEST_OUTSIDE * near + 1e-3 * float(new.abs().max()):
                expected = "one that places pixels by the size of a picture alone"
                got = f"one whose places of the pixels of picture {number + 1} depend on its colours"
                raise InputError("processor", expected=expected, got=got)


def pixel_places(pixels: Float[Tensor, "1 channels height width"]) -> tuple[ElementPlaces, Any]:
    """Return where the elements of pixel values lie in the picture that they are, and this picture as `PIL.Image`. The
    smallest value becomes black, and the largest one white.
    """
    image = require("PIL.Image", purpose="showing an image", extra="plot")
    values = pixels[0].detach().float().cpu()
    y, x = ((torch.arange(size, dtype=torch.float64) + 0.5) / size for size in values.shape[1:])
    y, x = (each.expand(values.shape).flatten() for each in (y[:, None], x))
    nothing = torch.zeros(values.numel(), dtype=torch.long)
    values = (values - values.min()) / (values.max() - values.min()).clamp(min=1e-12)
    values = values.expand(3, -1, -1) if len(values) == 1 else values[:3]
    integers = (values * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    return ElementPlaces(nothing, x, y, nothing), image.fromarray(integers.numpy())


def _parts_of(shape: torch.Size) -> Int[Tensor, " elements"]:
    """Return the number of the part of each element of an input: the index in the axes before the last three, which are
    channels, height and width.
    """
    size = shape[-3:].numel() if len(shape) > 3 else shape.numel()
    return torch.arange(shape.numel()) // max(size, 1)


class ShownPicture(NamedTuple):
    """Picture that a view shows: the index of a picture that the model reads, and the number of parts, such as tiles,
    that are shown in it. A picture that the model reads as a whole and in parts is shown twice.
    """

    picture: int
    parts: int


def patches_of(
    stream: TokenStream, places: Mapping[str, ElementPlaces]
) -> tuple[list[ShownPicture], list[Patch | None]]:
    """Return the pictures to show for the tokens of a stream, and the patch of each token; None for a token that stands
    for no part of a picture, or for the whole of it.

    A patch is the rectangle with the centre and the variance of the elements on which the token depends. The places of
    n elements at distances d have the variance (n^2 - 1) d^2 / 12, and fill the width n d. A token that depends on two
    parts with a gap between them, such as a patch and the values by which a series is scaled, has none.
    """
    columns: list[tuple[Tensor, ...]] = []
    parts_before = 0
    for name, of_elements in places.items():
        spacing = [_spacing(axis, of_elements.picture) for axis in (of_elements.x, of_elements.y)]
        for tokens in stream.tokens_of.get(name, ()):
            used = (tokens >= 0) & (of_elements.picture >= 0)
            values = of_elements.picture, of_elements.part + parts_before, of_elements.x, of_elements.y
            sizes = torch.tensor(spacing, dtype=torch.float64).expand(int(used.sum()), 2)
            columns.append((tokens[used], *(value[used] for value in values), sizes))
        parts_before += int(of_elements.part.max()) + 1
    patches: list[Patch | None] = [None] * stream.size
    if not columns or not sum(len(tokens) for tokens, *_ in columns):
        return [], patches
    token, picture, part, x, y, sizes = (torch.cat(each) for each in zip(*columns, strict=True))
    # A token of two pictures, such as two frames of a video, is shown in the one that has most of its elements.
    pairs, pair_of = torch.unique(torch.stack([token, picture, part]), dim=1, return_inverse=True)
    counts = torch.bincount(pair_of)
    best = {pairs[0, index].item(): index for index in counts.argsort(stable=True).tolist()}
    boxes: dict[int, tuple[int, int, Patch]] = {}
    for number, index in sorted(best.items()):
        chosen = pair_of == index
        sides = []
        for axis, spacing_of_axis in ((x, 0), (y, 1)):
            centre = axis[chosen].mean()
            size = (12 * axis[chosen].var(correction=0) + sizes[chosen][0, spacing_of_axis] ** 2).sqrt()
            low, high = (float((centre + sign * size / 2).clamp(0, 1)) for sign in (-1, 1))
            sides.append((low, high - low))
        (left, width), (top, height) = sides
        gaps = [torch.unique(axis[chosen]).diff() for axis in (x, y)]
        has_gap = any(
            len(gap) and float(gap.max()) > max(3 * float(distance), size / 4)
            for gap, distance, size in zip(gaps, sizes[chosen][0], (width, height), strict=True)
        )
        if min(width, height) < WHOLE and not has_gap:
            boxes[number] = int(pairs[1, index]), int(pairs[2, index]), Patch(0, left, top, width, height)
    boxes = _joined(boxes)
    shown_of_part, shown = _shown_pictures(list(boxes.values()))
    for number, (of_picture, of_part, patch) in boxes.items():
        patches[number] = patch._replace(picture=shown_of_part[of_picture, of_part])
    return shown, patches


def _joined(boxes: Mapping[int, tuple[int, int, Patch]]) -> dict[int, tuple[int, int, Patch]]:
    """Return patches whose edges are moved to those of their neighbours. `boxes` are a picture, a part of it and a
    patch, for each token. Edges that are closer than a tenth of the smallest patch differ by rounding, and become their
    mean.
    """
    edges = {
        number: [patch.left, patch.left + patch.width, patch.top, patch.top + patch.height]
        for number, (*_, patch) in boxes.items()
    }
    parts: dict[tuple[int, int], list[int]] = {}
    for number, (picture, part, _) in boxes.items():
        parts.setdefault((picture, part), []).append(number)
    for numbers in parts.values():
        for axis in (0, 2):
            smallest = min(edges[number][axis + 1] - edges[number][axis] for number in numbers)
            places = [(number, side) for number in numbers for side in (axis, axis + 1)]
            values = torch.tensor([edges[number][side] for number, side in places], dtype=torch.float64)
            order = values.argsort(stable=True)
            is_next = values[order].diff(prepend=values.new_full((1,), -1.0)) > smallest / 10
            group = (is_next.cumsum(0) - 1)[order.argsort(stable=True)]
            means = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group, values)
            means /= torch.bincount(group)
            for (number, side), mean in zip(places, means[group].tolist(), strict=True):
                edges[number][side] = mean
    return {
        number: (picture, part, Patch(0, left, top, right - left, bottom - top))
        for number, (picture, part, _) in boxes.items()
        for left, right, top, bottom in [edges[number]]
    }


def _spacing(places: Float[Tensor, " elements"], picture: Int[Tensor, " elements"]) -> float:
    """Return the usual distance between the places of neighbouring elements, along one axis of the pictures."""
    places, picture = places[picture >= 0], picture[picture >= 0]  # without padding, which may be between two rows
    steps = places.diff().abs()[picture[1:] == picture[:-1]]
    steps = steps[steps > 1e-6]
    if len(steps):
        return float(steps.median())
    return float(len(places) > 0 and bool((places == places[0]).all()))  # a single place fills the axis


def _shown_pictures(boxes: Sequence[tuple[int, int, Patch]]) -> tuple[dict[tuple[int, int], int], list[ShownPicture]]:
    """Return the index of the shown picture of each part, and the shown pictures. `boxes` are a picture, a part of it
    and a patch. Parts of a picture that overlap are shown in different pictures.
    """
    parts: dict[tuple[int, int], tuple[float, float, float, float]] = {}
    for picture, part, patch in boxes:
        left, top, right, bottom = parts.get((picture, part), (1.0, 1.0, 0.0, 0.0))
        right, bottom = max(right, patch.left + patch.width), max(bottom, patch.top + patch.height)
        parts[picture, part] = min(left, patch.left), min(top, patch.top), right, bottom
    layers: list[tuple[int, list[tuple[float, float, float, float]]]] = []
    shown_of_part = {}
    for (picture, part), box in parts.items():
        fitting = [
            index
            for index, (of_layer, others) in enumerate(layers)
            if of_layer == picture and all(_overlap(box, other) <= LARGEST_OVERLAP for other in others)
        ]
        if not fitting:
            fitting = [len(layers)]
            layers.append((picture, []))
        layers[fitting[0]][1].append(box)
        shown_of_part[picture, part] = fitting[0]
    return shown_of_part, [ShownPicture(picture, len(others)) for picture, others in layers]


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the area that two rectangles (left, top, right, bottom) share, as a fraction of the smaller one."""
    sides = [min(one[axis + 2], other[axis + 2]) - max(one[axis], other[axis]) for axis in (0, 1)]
    areas = [(each[2] - each[0]) * (each[3] - each[1]) for each in (one, other)]
    return max(sides[0], 0.0) * max(sides[1], 0.0) / max(min(areas), 1e-12)


def displayed_pictures(pictures: Sequence[Any], shown: Sequence[ShownPicture], medium: str) -> tuple[Picture, ...]:
    """Return pictures for display on a page: each is an image file in base64, not wider or higher than 768 pixels.
    `medium` is the name of each, before its number.
    """
    displayed = []
    for number, parts in shown:
        name = medium if len(pictures) == 1 else f"{medium} {number + 1}"
        if sum(other == number for other, _ in shown) > 1:
            name += ", whole" if parts == 1 else f", in {parts} parts"
        picture = pictures[number].convert("RGB")
        picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
        data = b""
        for kind, options in (("PNG", {"optimize": True}), ("JPEG", {"quality": 85})):
            buffer = io.BytesIO()
            picture.save(buffer, format=kind, **options)
            data = buffer.getvalue()
            if len(data) <= LARGEST_PNG:
                break
        source = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode('ascii')}"
        displayed.append(Picture(name, source, picture.width, picture.height))
    return tuple(displayed)
