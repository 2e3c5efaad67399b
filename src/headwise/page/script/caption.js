/** Title and colour scale of saved pictures. */
import {element, svgElement} from "./dom.js";
import {cssColour, propertyColour} from "./colours.js";

/** Height of the title and of the scale, in pixels. */
export const TITLE_HEIGHT = 30;
export const SCALE_HEIGHT = 34;

/** Number of steps of a scale. */
const STEPS = 48;

const CAPTION_LEFT = 12;
const BAR_WIDTH = 192;

/**
 * Return a copy of a canvas with a title above it and a colour scale below it.
 *
 * @param picture canvas with `ratio` pixels per pixel of the page
 * @param caption {title, low, high, colourAt}: texts of the title and of the ends of the scale, and the colour of each
 *   part of it, from 0 to 1
 */
export function canvasWithCaption(picture, ratio, {title, low, high, colourAt}) {
  const canvas = element("canvas", {
    width: picture.width,
    height: picture.height + (TITLE_HEIGHT + SCALE_HEIGHT) * ratio,
  });
  const context = canvas.getContext("2d");
  context.fillStyle = cssColour(propertyColour("--panel"));
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, TITLE_HEIGHT * ratio);
  context.scale(ratio, ratio);
  context.textBaseline = "middle";
  context.fillStyle = cssColour(propertyColour("--ink"));
  context.font = "bold 14px system-ui, sans-serif";
  context.fillText(title, CAPTION_LEFT, TITLE_HEIGHT / 2 + 2);
  context.font = "12px system-ui, sans-serif";
  const y = canvas.height / ratio - SCALE_HEIGHT / 2;
  context.fillText(low, CAPTION_LEFT, y);
  const start = CAPTION_LEFT + context.measureText(low).width + 8;
  context.fillText(high, start + BAR_WIDTH + 8, y);
  for (let step = 0; step < STEPS; step++) {
    context.fillStyle = cssColour(colourAt(step / (STEPS - 1)));
    context.fillRect(start + (step * BAR_WIDTH) / STEPS, y - 6, BAR_WIDTH / STEPS + 0.5, 12);
  }
  return canvas;
}

/** Return the title of a picture as an SVG element. */
export function svgTitle(title) {
  const fill = cssColour(propertyColour("--ink"));
  return svgElement("text", {x: CAPTION_LEFT, y: 20, "font-size": 14, "font-weight": 700, fill}, title);
}

/** Return a colour scale at a height of a picture as an SVG element; see `canvasWithCaption`. */
export function svgScale(y, {low, high, colourAt}) {
  const fill = cssColour(propertyColour("--ink"));
  const start = CAPTION_LEFT + 56;
  return svgElement(
    "g",
    {"font-size": 12, fill},
    svgElement("text", {x: start - 8, y: y + 16, "text-anchor": "end"}, low),
    ...Array.from({length: STEPS}, (_, step) =>
      svgElement("rect", {
        x: start + (step * BAR_WIDTH) / STEPS,
        y: y + 6,
        width: BAR_WIDTH / STEPS + 0.5,
        height: 12,
        fill: cssColour(colourAt(step / (STEPS - 1))),
      }),
    ),
    svgElement("text", {x: start + BAR_WIDTH + 8, y: y + 16}, high),
  );
}
