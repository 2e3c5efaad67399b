/** Pictures with the attention of a head on their patches, as one SVG picture with a title and a scale. */
import {formatSigned, formatWeight, svgElement} from "./dom.js";
import {SCALE_HEIGHT, TITLE_HEIGHT, svgScale, svgTitle} from "./caption.js";
import {cssColour, mixed, propertyColour} from "./colours.js";
import {VEIL} from "./overlay.js";

/** Height of a picture, and the largest width of it and of a row of pictures, in pixels. */
const PICTURE_HEIGHT = 320;
const ROW_WIDTH = 900;

const PICTURE_GAP = 12;
const NAME_HEIGHT = 20;

/**
 * Return the pictures of a text with their patches as an SVG element.
 *
 * @param shown {units, indices, strengths, scales, label, isSigned}: units with pictures, those that have a weight, the
 *   strengths of their colours, the scales of the colours, and what the colours mean
 * @param title text above the pictures
 * @param opacity opacity of the veil, from 0 to 1
 */
export function overlaySvg({units, indices, strengths, scales, label, isSigned}, title, opacity) {
  const strengthOf = new Map(indices.map((unit, place) => [unit, strengths[place]]));
  const ink = cssColour(propertyColour("--ink"));
  const [low, high] = ["--lower", "--higher"].map(name => propertyColour(name));
  const fillOf = strength => ({
    fill: cssColour(isSigned ? (strength < 0 ? low : high) : [VEIL, VEIL, VEIL]),
    "fill-opacity": (opacity * (isSigned ? Math.abs(strength) : 1 - strength)).toFixed(3),
  });
  let x = PICTURE_GAP;
  let y = TITLE_HEIGHT + NAME_HEIGHT;
  let widest = 380;
  let line = 0;
  const pictures = units.pictures.map(({name, source, width, height}, picture) => {
    const part = Math.min(PICTURE_HEIGHT / height, (ROW_WIDTH - 2 * PICTURE_GAP) / width);
    const [wide, tall] = [width * part, Math.max(height * part, 48)];
    if (x > PICTURE_GAP && x + wide > ROW_WIDTH) [x, y, line] = [PICTURE_GAP, y + line + NAME_HEIGHT + PICTURE_GAP, 0];
    const group = svgElement(
      "g",
      {transform: `translate(${x} ${y})`},
      svgElement("image", {
        href: source,
        width: wide,
        height: tall,
        preserveAspectRatio: "none",
        filter: isSigned ? "grayscale(1)" : null,
      }),
      ...units.patches.flatMap((patch, unit) => {
        if (patch?.[0] !== picture) return [];
        const [, left, top, patchWidth, patchHeight] = patch;
        return svgElement("rect", {
          x: (left * wide).toFixed(2),
          y: (top * tall).toFixed(2),
          width: (patchWidth * wide).toFixed(2),
          height: (patchHeight * tall).toFixed(2),
          "shape-rendering": "crispEdges",
          ...fillOf(strengthOf.get(unit) ?? 0),
        });
      }),
      svgElement("text", {y: tall + 15, "font-size": 12, fill: ink}, name),
    );
    x += wide + PICTURE_GAP;
    widest = Math.max(widest, x);
    line = Math.max(line, tall);
    return group;
  });
  const bottom = y + line + NAME_HEIGHT;
  const {largest, strength} = scales.patch;
  const ground = propertyColour("--accent");
  const colourAt = part => {
    if (!isSigned) return mixed(ground, [VEIL, VEIL, VEIL], opacity * (1 - strength * Math.sqrt(part)));
    const signed = 2 * part - 1;
    const size = opacity * strength * Math.sqrt(Math.abs(signed));
    return mixed(propertyColour("--panel"), signed < 0 ? low : high, size);
  };
  return svgElement(
    "svg",
    {viewBox: `0 0 ${Math.ceil(widest)} ${Math.ceil(bottom + SCALE_HEIGHT)}`, "font-family": "system-ui, sans-serif"},
    svgElement("rect", {width: "100%", height: "100%", fill: cssColour(propertyColour("--panel"))}),
    svgTitle(title),
    svgElement("text", {x: PICTURE_GAP, y: TITLE_HEIGHT + 10, "font-size": 12, fill: ink}, label),
    ...pictures,
    svgScale(bottom, {
      low: isSigned ? formatSigned(-largest) : "0",
      high: isSigned ? formatSigned(largest) : formatWeight(largest),
      colourAt,
    }),
  );
}
