/** Painting of a matrix with its words on a canvas. */
import {cssColour, mixed, propertyColour, roleColour} from "./colours.js";
import {pixelWeights, scalePart} from "./matrix.js";
import {shortened} from "./words.js";

/** Width or height of the margins around the plot, in pixels. */
export const LEFT_MARGIN = 92;
export const RIGHT_MARGIN = 30;
export const TOP_MARGIN = 74;

/** Smallest cell that has its word as a label, in pixels. */
const SMALLEST_LABELLED_CELL = 11;

/**
 * Paint a matrix.
 *
 * @param canvas target, which gets the size of the plot and its margins
 * @param content {grid, role, largest}: what is painted, the role that decides the colour, and the largest weight
 * @param frame {view, bounds, ratio, scale, active}: part that is visible, size, device pixels per pixel, scale, and active word
 */
export function paintMatrix(canvas, {grid, role, largest}, {view, bounds, ratio, scale, active}) {
  const {width, height} = bounds;
  const ground = propertyColour("--panel");
  const unseen = propertyColour("--unseen");
  const colour = roleColour(role);
  canvas.width = Math.round((width + LEFT_MARGIN + RIGHT_MARGIN) * ratio);
  canvas.height = Math.round((height + TOP_MARGIN) * ratio);
  canvas.style.setProperty("width", `${width + LEFT_MARGIN + RIGHT_MARGIN}px`);
  canvas.style.setProperty("height", `${height + TOP_MARGIN}px`);
  const context = canvas.getContext("2d");
  const image = context.createImageData(Math.round(width * ratio), Math.round(height * ratio));
  const colours = Array.from({length: 256}, (_, part) => mixed(ground, colour, part / 255));
  pixelWeights(grid, view, image.width, image.height, ratio).forEach((weight, place) => {
    const rgb = Number.isNaN(weight) ? unseen : colours[Math.round(255 * scalePart(weight, largest, scale))];
    image.data[4 * place] = rgb[0];
    image.data[4 * place + 1] = rgb[1];
    image.data[4 * place + 2] = rgb[2];
    image.data[4 * place + 3] = 255;
  });
  context.fillStyle = cssColour(ground);
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.putImageData(image, Math.round(LEFT_MARGIN * ratio), Math.round(TOP_MARGIN * ratio));
  context.scale(ratio, ratio);
  context.strokeStyle = cssColour(propertyColour("--line"));
  context.strokeRect(LEFT_MARGIN - 0.5, TOP_MARGIN - 0.5, width + 1, height + 1);
  paintLabels(context, grid, view, bounds, active);
}

function paintLabels(context, {matrix, rows, columns}, view, bounds, active) {
  const ink = cssColour(propertyColour("--ink"));
  const soft = cssColour(propertyColour("--soft"));
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.save();
  context.translate(0, TOP_MARGIN);
  paintAxis(
    context,
    matrix.queryUnits,
    rows,
    view.top,
    view.cellY,
    bounds.height,
    active?.axis === "query" ? active.unit : -1,
    {ink, soft},
    (text, y) => {
      context.textAlign = "right";
      context.fillText(text, LEFT_MARGIN - 6, y);
    },
  );
  context.restore();
  context.save();
  context.translate(LEFT_MARGIN, TOP_MARGIN - 6);
  paintAxis(
    context,
    matrix.keyUnits,
    columns,
    view.left,
    view.cellX,
    bounds.width,
    active?.axis === "key" ? active.unit : -1,
    {ink, soft},
    (text, x) => {
      context.save();
      context.translate(x, 0);
      context.rotate(-Math.PI / 3);
      context.textAlign = "left";
      context.fillText(text, 0, 0);
      context.restore();
    },
  );
  context.restore();
}

/** Write words next to large cells, and positions next to small ones. */
function paintAxis(context, units, shown, start, cell, size, active, {ink, soft}, write) {
  const step = cell >= SMALLEST_LABELLED_CELL ? 1 : niceStep(40 / cell);
  for (
    let place = Math.ceil(start / step) * step;
    place < shown.length && (place - start) * cell < size;
    place += step
  ) {
    const unit = shown[place];
    const centre = (place + 0.5 - start) * cell;
    if (centre < 0 || centre > size) continue;
    context.fillStyle = units.special[unit] || step > 1 ? soft : ink;
    if (unit === active) context.font = "bold 12px system-ui, sans-serif";
    write(step === 1 ? shortened(units.labels[unit], 12) : String(unit + 1), centre);
    context.font = "12px system-ui, sans-serif";
  }
}

/** Return the smallest of 1, 2, 5, 10, 20, 50, … that is at least a number. */
export function niceStep(least) {
  let step = 1;
  for (let place = 0; step < least; place++) step = [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3);
  return step;
}
