/** Thumbnails: small pictures of a head's attention, drawn from its tiles. */
import {cssColour, mixed} from "./colours.js";

/** Return numbers resampled by area from `rows` x `columns` to `height` x `width`. Each number counts by its area. */
export function resampled(numbers, rows, columns, height, width) {
  const wide = new Float32Array(rows * width);
  const result = new Float32Array(height * width);
  for (const {from, to, part} of overlaps(columns, width)) {
    for (let row = 0; row < rows; row++) wide[row * width + to] += part * numbers[row * columns + from];
  }
  for (const {from, to, part} of overlaps(rows, height)) {
    for (let x = 0; x < width; x++) result[to * width + x] += part * wide[from * width + x];
  }
  return result;
}

/** Return the overlaps of `count` equal intervals with `size` equal intervals, as parts of the latter. */
function overlaps(count, size) {
  const found = [];
  for (let to = 0; to < size; to++) {
    const start = (to * count) / size;
    const stop = ((to + 1) * count) / size;
    for (let from = Math.floor(start); from < Math.min(Math.ceil(stop - 1e-9), count); from++) {
      found.push({from, to, part: (Math.min(stop, from + 1) - Math.max(start, from)) / (stop - start)});
    }
  }
  return found;
}

/** Draw weights as a square picture. The colour is that of the square root, because small weights would be invisible. */
export function drawTiles(canvas, tiles, size, ground, colour) {
  drawPixels(canvas, resampled(tiles.weights, tiles.rows, tiles.columns, size, size), size, weight =>
    mixed(ground, colour, Math.sqrt(Math.min(weight, 1))),
  );
}

/** Draw the difference of two heads' weights, B − A, as a square picture. `colourAt` maps -1 to 1 to a colour. */
export function drawDifference(canvas, a, b, size, colourAt) {
  const [before, after] = [a, b].map(tiles => resampled(tiles.weights, tiles.rows, tiles.columns, size, size));
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
