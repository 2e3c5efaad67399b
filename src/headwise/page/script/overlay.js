/** Overlays of the overview: a small picture for each head, veiled where its patches get little attention. */
import {meanAttention} from "./meanattention.js";
import {scalesOf, tintStrength} from "./tint.js";

/** Start of the setting "colour" if the cells show a picture; the name of the picture follows. */
const PREFIX = "picture:";

/** Brightness of the veil, from 0 to 255, as in the style sheet. */
export const VEIL = 80;

/** Return the pictures of a passage that cells can show, as options {value, text} of the setting "colour". */
export function overlayOptions({sides}) {
  const names = sides.flatMap(side => side.pictures.map(picture => picture.name));
  return [...new Set(names)].map(name => ({value: PREFIX + name, text: `attention on ${name}`}));
}

/** Return the name of the picture that the cells show, or null if they do not show a picture. */
export function overlayName({page, state, passage}) {
  const colour = state.get("colour");
  const options = page.passages.length && state.get("model") !== "difference" ? overlayOptions(page.passages[passage()]) : [];
  return options.some(option => option.value === colour) ? colour.slice(PREFIX.length) : null;
}

/**
 * Return the attention of a head on a picture, {picture, units, weights, scale, share, active}, or null if the head does not
 * attend to it. It is that of the pinned word, or the mean of the rows that are shown, without rows of patches if the text
 * also has words. `weights` are those of all units, and `share` is their sum on the picture.
 */
export async function overlayOf(app, model, head, name) {
  const passage = app.passage();
  if (!app.page.passages[passage].heads[model][head]) return null;
  const {units, weights, least, active} = await meanAttention(app, passage, model, [head], true);
  const place = units.pictures.findIndex(picture => picture.name === name);
  if (place < 0) return null;
  const indices = [...units.patches.keys()].filter(unit => units.patches[unit]?.[0] === place);
  const scales = scalesOf([{units, indices, weights: indices.map(unit => weights[unit])}], least[indices[0]]);
  const share = indices.reduce((sum, unit) => sum + weights[unit], 0);
  return {picture: units.pictures[place], indices, units, weights, scale: scales.patch, share, active};
}

const images = new Map();

/** Return the decoded image of a picture. */
export function imageOf({source}) {
  if (!images.has(source)) {
    const image = new Image();
    image.src = source;
    images.set(source, image.decode().then(() => image));
  }
  return images.get(source);
}

/** Draw a picture in the middle of a square canvas, with a veil on its patches. */
export function drawOverlay(canvas, image, {picture, indices, units, weights, scale}, size, opacity) {
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  const part = size / Math.max(picture.width, picture.height);
  const [width, height] = [picture.width * part, picture.height * part];
  const [x, y] = [(size - width) / 2, (size - height) / 2];
  context.drawImage(image, x, y, width, height);
  // Edges on whole pixels leave no lines between the patches.
  const edges = (start, length, from, all) => [start, start + length].map(edge => Math.round(from + edge * all));
  for (const unit of indices) {
    const [, left, top, wide, high] = units.patches[unit];
    const [[x0, x1], [y0, y1]] = [edges(left, wide, x, width), edges(top, high, y, height)];
    context.fillStyle = `rgb(${VEIL} ${VEIL} ${VEIL} / ${(1 - tintStrength(weights[unit], scale)) * opacity})`;
    context.fillRect(x0, y0, x1 - x0, y1 - y0);
  }
}
