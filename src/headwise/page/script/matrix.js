/** Geometry, cells and pixels of the matrix of a head. Rows are queries, columns are keys. */
import {visibleUnits} from "./attention.js";
import {tileRows} from "./tiles.js";

/** Largest size of a cell in pixels. */
const LARGEST_CELL = 64;

/**
 * Return the view that shows the whole matrix: {left, top} in cells, and {cellX, cellY}, the size of a cell in pixels.
 *
 * @param bounds {rows, columns, width, height}: number of cells, and the size of the plot in pixels
 */
export function fittedView({rows, columns, width, height}) {
  return {left: 0, top: 0, cellX: width / columns, cellY: height / rows};
}

/** Return true if a view shows the whole matrix in a plot of this size. */
export function isFitted(view, bounds) {
  const fitted = fittedView(bounds);
  return view.cellX <= fitted.cellX * 1.001 && view.cellY <= fitted.cellY * 1.001;
}

/** Return the view zoomed by a factor around a point of the plot, which keeps its place. */
export function zoomedView(view, bounds, x, y, factor) {
  const fitted = fittedView(bounds);
  const limit = (cell, smallest) => Math.min(Math.max(cell, smallest), Math.max(LARGEST_CELL, smallest));
  const cellX = limit(view.cellX * factor, fitted.cellX);
  const cellY = limit(view.cellY * factor, fitted.cellY);
  return clamped(
    {left: view.left + x / view.cellX - x / cellX, top: view.top + y / view.cellY - y / cellY, cellX, cellY},
    bounds,
  );
}

/** Return the view moved by pixels. */
export function pannedView(view, bounds, dx, dy) {
  return clamped({...view, left: view.left - dx / view.cellX, top: view.top - dy / view.cellY}, bounds);
}

function clamped(view, {rows, columns, width, height}) {
  const clamp = (start, cells, shown) => Math.min(Math.max(start, 0), Math.max(cells - shown, 0));
  return {
    ...view,
    left: clamp(view.left, columns, width / view.cellX),
    top: clamp(view.top, rows, height / view.cellY),
  };
}

/** Return the cell at a point of the plot, {row, column}, or null outside the matrix. */
export function cellAt(view, {rows, columns}, x, y) {
  const row = Math.floor(view.top + y / view.cellY);
  const column = Math.floor(view.left + x / view.cellX);
  return row >= 0 && row < rows && column >= 0 && column < columns ? {row, column} : null;
}

/** Return the rows and columns of a matrix that are shown: {matrix, rows, columns, columnOf, tiles}. */
export function matrixGrid(matrix, rows, columns, tiles) {
  const columnOf = new Int32Array(matrix.keyUnits.count).fill(-1);
  columns.forEach((key, column) => {
    columnOf[key] = column;
  });
  return {matrix, rows, columns, columnOf, tiles};
}

/**
 * Return a function from a row of a grid to the weights of its cells: NaN where the key is not visible. Where the matrix
 * lists only the largest weights, other cells have the mean weight of the tile around them.
 */
export function cellWeights(grid) {
  const listedWeights = listedCells(grid);
  if (!hasBackground(grid)) return listedWeights;
  const backgroundWeights = backgroundCells(grid);
  return row => {
    const weights = backgroundWeights(row);
    const listed = listedWeights(row);
    for (let column = 0; column < weights.length; column++)
      if (!Number.isNaN(listed[column])) weights[column] = listed[column];
    return weights;
  };
}

/** Return true if cells that the matrix does not list have the mean weight of the tile around them. */
function hasBackground({matrix, tiles}) {
  return Boolean(tiles) && (matrix.approximate ?? !matrix.exact);
}

/** Return a function from a row of a grid to the listed weights of its cells: NaN where none is listed. */
function listedCells({matrix, rows, columns, columnOf}) {
  return row => {
    const weights = new Float32Array(columns.length).fill(NaN);
    for (let entry = matrix.start[rows[row]]; entry < matrix.start[rows[row] + 1]; entry++) {
      const column = columnOf[matrix.key[entry]];
      if (column >= 0) weights[column] = matrix.weight[entry];
    }
    return weights;
  };
}

/** Return a function from a row of a grid to the weights of its cells by tiles: NaN where the key is not visible. */
function backgroundCells({matrix, rows, columns, tiles}) {
  const weightsOf = tileRows({matrix, tiles});
  return row => {
    const background = weightsOf(rows[row]);
    const visible = visibleUnits(matrix, rows[row]);
    const weights = new Float32Array(columns.length).fill(NaN);
    for (let column = 0; column < columns.length; column++)
      if (visible[columns[column]]) weights[column] = background[columns[column]];
    return weights;
  };
}

/**
 * Return the weight of each pixel: NaN where no key is visible.
 *
 * A pixel that covers several cells has the sum over its keys and the mean over its queries, as the tiles have. If some
 * of its weights are not listed, this is the larger one of the sum of those that are listed and of the tiles.
 */
export function pixelWeights(grid, view, width, height, ratio) {
  const cellX = view.cellX * ratio;
  const cellY = view.cellY * ratio;
  const rowSpans = spansOf(grid.rows.length, view.top, cellY, height);
  const columnSpans = spansOf(grid.columns.length, view.left, cellX, width);
  const share = Math.min(cellY, 1);
  if (!hasBackground(grid)) return listedSums(grid, rowSpans, columnSpans, share);
  if (cellX >= 1 && cellY >= 1) return cellPixels(grid, rowSpans, columnSpans);
  const background = backgroundSums(grid, rowSpans, columnSpans);
  const listed = listedSums(grid, rowSpans, columnSpans, share);
  const {signed} = grid.matrix;
  return background.map((weight, place) =>
    Number.isNaN(listed[place]) || (!signed && weight > listed[place]) ? weight : listed[place],
  );
}

/** Return the weight of each pixel if no cell is smaller than a pixel. */
function cellPixels(grid, rowSpans, columnSpans) {
  const {size} = columnSpans;
  const pixels = new Float32Array(size * rowSpans.size).fill(NaN);
  const weightsOf = cellWeights(grid);
  for (const row of rowSpans.cells) {
    const weights = weightsOf(row);
    for (const column of columnSpans.cells) {
      if (Number.isNaN(weights[column])) continue;
      for (let y = rowSpans.from[row]; y < rowSpans.to[row]; y++)
        for (let x = columnSpans.from[column]; x < columnSpans.to[column]; x++) pixels[y * size + x] = weights[column];
    }
  }
  return pixels;
}

/**
 * Return the sums of the weights in each pixel by tiles. The keys and the queries of a small pixel are nearly always
 * visible together and in the same row of tiles, so that the first ones stand for all of them.
 */
function backgroundSums({matrix, rows, columns, tiles}, rowSpans, columnSpans) {
  const {size} = columnSpans;
  const pixels = new Float32Array(size * rowSpans.size).fill(NaN);
  const weightsOf = tileRows({matrix, tiles});
  const firstColumns = firstOfPixels(columnSpans);
  const lines = new Map();
  for (const row of firstOfPixels(rowSpans)) {
    const weights = weightsOf(rows[row]);
    if (!lines.has(weights)) lines.set(weights, pixelLine(weights, columns, columnSpans));
    const line = lines.get(weights);
    const visible = visibleUnits(matrix, rows[row]);
    for (const column of firstColumns) {
      if (!visible[columns[column]]) continue;
      for (let y = rowSpans.from[row]; y < rowSpans.to[row]; y++)
        for (let x = columnSpans.from[column]; x < columnSpans.to[column]; x++) pixels[y * size + x] = line[x];
    }
  }
  return pixels;
}

/** Return the sums of the weights of the keys in each pixel of a line. */
function pixelLine(weights, columns, {cells, from, to, size}) {
  const line = new Float32Array(size);
  for (const column of cells)
    for (let x = from[column]; x < to[column]; x++) line[x] += weights[columns[column]];
  return line;
}

/** Return the sums of the listed weights in each pixel, times a share. */
function listedSums({matrix, rows, columnOf}, rowSpans, columnSpans, share) {
  const {size} = columnSpans;
  const pixels = new Float32Array(size * rowSpans.size).fill(NaN);
  for (const row of rowSpans.cells) {
    for (let entry = matrix.start[rows[row]]; entry < matrix.start[rows[row] + 1]; entry++) {
      const column = columnOf[matrix.key[entry]];
      if (column < 0) continue;
      for (let y = rowSpans.from[row]; y < rowSpans.to[row]; y++) {
        for (let x = columnSpans.from[column]; x < columnSpans.to[column]; x++) {
          const place = y * size + x;
          pixels[place] = (Number.isNaN(pixels[place]) ? 0 : pixels[place]) + share * matrix.weight[entry];
        }
      }
    }
  }
  return pixels;
}

/**
 * Return the pixels of cells along one axis, {cells, from, to, size}: each of the visible `cells` has the pixels
 * from[cell] <= x < to[cell] of `size` pixels.
 *
 * @param count number of cells
 * @param start cell at the first pixel
 * @param length length of a cell in pixels
 * @param size number of pixels
 */
function spansOf(count, start, length, size) {
  const first = Math.floor(start);
  const last = Math.min(count, Math.ceil(start + size / length));
  const cells = Int32Array.from({length: Math.max(last - first, 0)}, (_, place) => first + place);
  const from = new Int32Array(count);
  const to = new Int32Array(count);
  for (const cell of cells) {
    const offset = (cell - start) * length;
    const pixel = length < 1 ? Math.floor(offset) : Math.round(offset);
    from[cell] = Math.max(pixel, 0);
    to[cell] = Math.min(length < 1 ? pixel + 1 : Math.round(offset + length), size);
  }
  return {cells, from, to, size};
}

/** Return the visible cells that do not begin in the same pixel as the cell before. */
function firstOfPixels({cells, from}) {
  return cells.filter((cell, place) => !place || from[cell] !== from[cells[place - 1]]);
}

/** Return the part of the colour scale for a weight, from 0 to 1; for a negative difference, from -1. */
export function scalePart(weight, largest, scale) {
  const part = Math.min(Math.abs(weight) / largest, 1);
  return Math.sign(weight) * (scale === "root" ? Math.sqrt(part) : part);
}
