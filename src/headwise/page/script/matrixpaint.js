/** Painting of a matrix with its words on a canvas. */
import {cssColour, mixed, propertyColour, roleColour, scaleColour, scaleStops} from "./colours.js";
import {pixelWeights, scalePart} from "./matrix.js";
import {nounOf, shortened} from "./words.js";

/** Width or height of the margins around the plot, in pixels. */
export const LEFT_MARGIN = 92;
export const RIGHT_MARGIN = 30;
export const TOP_MARGIN = 74;

/** Smallest cell that has its word as a label, in pixels. */
const SMALLEST_LABELLED_CELL = 11;

/** Longest label of a row or a column, in characters. */
const LONGEST_LABEL = {word: 12, patch: 16};

/** Return the label of a unit. If there are several pictures, that of a patch has the number of its picture, as "#2 (3, 4)". */
function axisLabel({labels, patches, pictures}, unit) {
  if (!patches[unit] || pictures.length < 2) return labels[unit];
  const [picture] = patches[unit];
  return labels[unit].replace(`${pictures[picture].name} `, () => `#${picture + 1} `);
}

/**
 * Return the colours of a matrix: a function from a part of the scale to a colour. Parts are from 0 to 1; of
 * differences, from -1 to 1. `strength` bounds the colour of the largest weight, so that uniform attention does not look
 * like a focus.
 */
export function matrixColours({matrix, role, strength}) {
  if (matrix.signed) {
    const stops = scaleStops("diverging");
    return part => scaleColour(stops, (strength * part + 1) / 2);
  }
  const [ground, colour] = [propertyColour("--panel"), roleColour(role)];
  return part => mixed(ground, colour, strength * part);
}

/**
 * Paint a matrix.
 *
 * @param canvas target, which gets the size of the plot and its margins
 * @param content {grid, matrix, role, largest, strength}: what is painted, the role that decides the colour, the largest
 *   weight, and the strength of its colour
 * @param frame {view, bounds, ratio, scale, active, pointed}: part that is visible, size, device pixels per pixel, scale,
 *   active word, and the {query, key} under the pointer
 * @param cache object that keeps the pixels, which change less often than the labels
 */
export function paintMatrix(canvas, content, frame, cache = {}) {
  const {view, bounds, ratio, scale} = frame;
  const {width, height} = bounds;
  canvas.width = Math.round((width + LEFT_MARGIN + RIGHT_MARGIN) * ratio);
  canvas.height = Math.round((height + TOP_MARGIN) * ratio);
  canvas.style.setProperty("width", `${width + LEFT_MARGIN + RIGHT_MARGIN}px`);
  canvas.style.setProperty("height", `${height + TOP_MARGIN}px`);
  const context = canvas.getContext("2d");
  const theme = document.documentElement.dataset.theme;
  const key = JSON.stringify([view, width, height, ratio, scale, theme]);
  if (cache.key !== key || cache.content !== content)
    Object.assign(cache, {key, content, image: matrixImage(context, content, frame)});
  context.fillStyle = cssColour(propertyColour("--panel"));
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.putImageData(cache.image, Math.round(LEFT_MARGIN * ratio), Math.round(TOP_MARGIN * ratio));
  context.scale(ratio, ratio);
  context.strokeStyle = cssColour(propertyColour("--line"));
  context.strokeRect(LEFT_MARGIN - 0.5, TOP_MARGIN - 0.5, width + 1, height + 1);
  paintLabels(context, content.grid, frame);
}

function matrixImage(context, content, {view, bounds, ratio, scale}) {
  const image = context.createImageData(Math.round(bounds.width * ratio), Math.round(bounds.height * ratio));
  const unseen = propertyColour("--unseen");
  const colourAt = matrixColours(content);
  const colours = Array.from({length: 511}, (_, place) => colourAt((place - 255) / 255));
  pixelWeights(content.grid, view, image.width, image.height, ratio).forEach((weight, place) => {
    const part = Math.round(255 * scalePart(weight, content.largest, scale));
    const rgb = Number.isNaN(weight) ? unseen : colours[255 + part];
    image.data[4 * place] = rgb[0];
    image.data[4 * place + 1] = rgb[1];
    image.data[4 * place + 2] = rgb[2];
    image.data[4 * place + 3] = 255;
  });
  return image;
}

function paintLabels(context, {matrix, rows, columns}, {view, bounds, active, pointed}) {
  const colours = {
    ink: cssColour(propertyColour("--ink")),
    soft: cssColour(propertyColour("--soft")),
    ground: cssColour(propertyColour("--panel")),
    accent: cssColour(propertyColour("--accent")),
  };
  context.textBaseline = "middle";
  context.save();
  context.translate(0, TOP_MARGIN);
  const row = {units: matrix.queryUnits, shown: rows, start: view.top, cell: view.cellY, size: bounds.height};
  const activeOf = axis => (active?.axis === axis ? active.unit : -1);
  paintAxis(context, {...row, active: activeOf("query"), pointed: pointed?.query ?? -1}, colours, "right", y =>
    context.translate(LEFT_MARGIN - 6, y),
  );
  context.restore();
  context.save();
  context.translate(LEFT_MARGIN, TOP_MARGIN - 6);
  const column = {units: matrix.keyUnits, shown: columns, start: view.left, cell: view.cellX, size: bounds.width};
  paintAxis(context, {...column, active: activeOf("key"), pointed: pointed?.key ?? -1}, colours, "left", x => {
    context.translate(x, 0);
    context.rotate(-Math.PI / 3);
  });
  context.restore();
}

/** Write words next to large cells, and positions next to small ones. The word under the pointer is always written. */
function paintAxis(context, {units, shown, start, cell, size, active, pointed}, colours, align, move) {
  const {ink, soft, ground, accent} = colours;
  const step = cell >= SMALLEST_LABELLED_CELL ? 1 : niceStep(40 / cell);
  const write = (text, centre, colour, isBold, isOver) => {
    context.save();
    move(centre);
    context.textAlign = align;
    context.font = `${isBold ? "bold " : ""}12px system-ui, sans-serif`;
    if (isOver) {
      const width = context.measureText(text).width + 4;
      context.fillStyle = ground;
      context.fillRect(align === "right" ? 2 - width : -2, -9, width, 18);
    }
    context.fillStyle = colour;
    context.fillText(text, 0, 0);
    context.restore();
  };
  const name = unit => shortened(axisLabel(units, unit), LONGEST_LABEL[nounOf(units, unit)]);
  const centreOf = place => (place + 0.5 - start) * cell;
  const first = Math.ceil(start / step) * step;
  for (let place = first; place < shown.length && (place - start) * cell < size; place += step) {
    const unit = shown[place];
    const centre = centreOf(place);
    if (centre < 0 || centre > size || unit === pointed) continue;
    const colour = units.special[unit] || step > 1 ? soft : ink;
    write(step === 1 ? name(unit) : String(unit + 1), centre, colour, unit === active);
  }
  const place = shown.indexOf(pointed);
  if (place >= 0) write(name(pointed), centreOf(place), accent, true, true);
}

/** Return the smallest of 1, 2, 5, 10, 20, 50, … that is at least a number. */
export function niceStep(least) {
  let step = 1;
  for (let place = 0; step < least; place++) step = [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3);
  return step;
}
