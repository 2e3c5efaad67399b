/** Thumbnails: small pictures of a head's attention, drawn from its tiles. */
import {cssColour, mixed} from "./colours.js";
import {strengthOfLargest} from "./tint.js";

/**
 * Return tiles resampled to `height` x `width` pixels. Each tile counts by its area, which is the number of its tokens.
 * A tile has a sum over its keys: a column with more keys is spread over more pixels, and not darker.
 */
export function resampled({rows, columns, rowSizes, columnSizes, weights}, height, width) {
  const wide = new Float32Array(rows * width);
  const result = new Float32Array(height * width);
  const meanSize = sumOf(columnSizes) / columns;
  for (const {from, to, part} of overlaps(columnSizes, width)) {
    const share = (part * meanSize) / columnSizes[from];
    for (let row = 0; row < rows; row++) wide[row * width + to] += share * weights[row * columns + from];
  }
  for (const {from, to, part} of overlaps(rowSizes, height)) {
    for (let x = 0; x < width; x++) result[to * width + x] += part * wide[from * width + x];
  }
  return result;
}

function sumOf(numbers) {
  return numbers.reduce((sum, number) => sum + number, 0);
}

/** Return the overlaps of intervals of the given sizes with `count` equal intervals, as parts of the latter. */
function overlaps(sizes, count) {
  const length = sumOf(sizes) / count;
  const found = [];
  let stop = 0;
  sizes.forEach((size, from) => {
    const start = stop;
    stop += size;
    for (let to = Math.floor(start / length); to < Math.min(Math.ceil(stop / length - 1e-9), count); to++) {
      const overlap = Math.min(stop, (to + 1) * length) - Math.max(start, to * length);
      found.push({from, to, part: overlap / length});
    }
  });
  return found;
}

/** Share of the visible pixels of a thumbnail that have at least the weight with the full colour. */
const FULL_PIXELS = 0.02;

/**
 * Draw weights as a square picture. The colour is that of the square root, because small weights would be invisible. Its
 * scale is that of the picture's largest weights, so that heads whose weights are all small differ, too.
 */
export function drawTiles(canvas, tiles, size, ground, colour) {
  const weights = resampled(tiles, size, size);
  const sorted = weights.filter(weight => weight > 0).sort();
  const largest = sorted[Math.floor((1 - FULL_PIXELS) * sorted.length)] ?? 1;
  const uniform = sorted.reduce((sum, weight) => sum + weight, 0) / sorted.length;
  const strength = strengthOfLargest(largest, uniform);
  drawPixels(canvas, weights, size, weight =>
    mixed(ground, colour, strength * Math.sqrt(Math.min(weight / largest, 1))),
  );
}

/** Draw the difference of two heads' weights, B − A, as a square picture. `colourAt` maps -1 to 1 to a colour. */
export function drawDifference(canvas, a, b, size, colourAt) {
  const [before, after] = [a, b].map(tiles => resampled(tiles, size, size));
  drawPixels(
    canvas,
    after.map((weight, place) => weight - before[place]),
    size,
    difference => colourAt(Math.sign(difference) * Math.sqrt(Math.abs(difference))),
  );
}

function drawPixels(canvas, numbers, size, colourOf) {
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  numbers.forEach((number, place) => {
    image.data.set(colourOf(number), 4 * place);
    image.data[4 * place + 3] = 255;
  });
  context.putImageData(image, 0, 0);
}

/** Draw a scale from left to right on a canvas. */
export function drawScale(canvas, colourAt) {
  canvas.width = 120;
  canvas.height = 8;
  const context = canvas.getContext("2d");
  for (let x = 0; x < 120; x++) {
    context.fillStyle = cssColour(colourAt(x / 119));
    context.fillRect(x, 0, 1, 8);
  }
}
