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
    const background = backgroundWeights(row);
    listedWeights(row).forEach((weight, column) => {
      if (!Number.isNaN(weight)) background[column] = weight;
    });
    return background;
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
function backgroundCells(grid) {
  const weightsOf = tileRows(grid);
  return row => {
    const background = weightsOf(grid.rows[row]);
    const visible = visibleUnits(grid.matrix, grid.rows[row]);
    return Float32Array.from(grid.columns, key => (visible[key] ? background[key] : NaN));
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
  const sumsOf = weightsOf => pixelSums(weightsOf, grid.rows.length, {...view, cellX, cellY}, width, height);
  if (!hasBackground(grid) || (cellX >= 1 && cellY >= 1)) return sumsOf(cellWeights(grid));
  const background = sumsOf(backgroundCells(grid));
  const listed = sumsOf(listedCells(grid));
  const {signed} = grid.matrix;
  return background.map((weight, place) =>
    Number.isNaN(listed[place]) || (!signed && weight > listed[place]) ? weight : listed[place],
  );
}

function pixelSums(weightsOf, rows, {left, top, cellX, cellY}, width, height) {
  const pixels = new Float32Array(width * height).fill(NaN);
  const share = Math.min(cellY, 1);
  const last = Math.min(rows, Math.ceil(top + height / cellY));
  for (let row = Math.floor(top); row < last; row++) {
    const [y0, y1] = span(row - top, cellY, height);
    const line = pixelLine(weightsOf(row), left, cellX, width);
    for (let y = y0; y < y1; y++) {
      for (let x = 0; x < width; x++) {
        if (Number.isNaN(line[x])) continue;
        const place = y * width + x;
        pixels[place] = (Number.isNaN(pixels[place]) ? 0 : pixels[place]) + share * line[x];
      }
    }
  }
  return pixels;
}

/** Return the weight of each pixel of a row of cells. */
function pixelLine(weights, left, cellX, width) {
  const line = new Float32Array(width).fill(NaN);
  const last = Math.min(weights.length, Math.ceil(left + width / cellX));
  for (let column = Math.floor(left); column < last; column++) {
    if (Number.isNaN(weights[column])) continue;
    const [x0, x1] = span(column - left, cellX, width);
    for (let x = x0; x < x1; x++) line[x] = (Number.isNaN(line[x]) ? 0 : line[x]) + weights[column];
  }
  return line;
}

/** Return the first pixel of a cell and the pixel after its last. */
function span(offset, cell, size) {
  const from = cell < 1 ? Math.floor(offset * cell) : Math.round(offset * cell);
  const to = cell < 1 ? from + 1 : Math.round((offset + 1) * cell);
  return [Math.max(from, 0), Math.min(to, size)];
}

/** Return the part of the colour scale for a weight, from 0 to 1; for a negative difference, from -1. */
export function scalePart(weight, largest, scale) {
  const part = Math.min(Math.abs(weight) / largest, 1);
  return Math.sign(weight) * (scale === "root" ? Math.sqrt(part) : part);
}
