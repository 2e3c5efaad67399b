/** Geometry and pixels of the matrix of a head. Rows are queries, columns are keys. */

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
 * Return the weight of each pixel: NaN where no key is visible.
 *
 * A pixel that covers several cells has the sum over its keys and the mean over its queries, as the tiles have. Where
 * the matrix lists only the largest weights, the tiles are the background.
 */
export function pixelWeights(grid, view, width, height, ratio) {
  const {matrix, rows, columnOf} = grid;
  const pixels = new Float32Array(width * height).fill(NaN);
  if (grid.tiles && (matrix.approximate ?? !matrix.exact))
    paintTileBackground(pixels, grid, view, width, height, ratio);
  const cellX = view.cellX * ratio;
  const cellY = view.cellY * ratio;
  const sums = new Float32Array(width * height).fill(NaN);
  const last = Math.min(rows.length, Math.ceil(view.top + height / cellY));
  for (let row = Math.floor(view.top); row < last; row++) {
    const [y0, y1] = span(row - view.top, cellY, height);
    const share = Math.min(cellY, 1);
    for (let entry = matrix.start[rows[row]]; entry < matrix.start[rows[row] + 1]; entry++) {
      const column = columnOf[matrix.key[entry]];
      if (column < 0 || column + 1 < view.left) continue;
      const [x0, x1] = span(column - view.left, cellX, width);
      for (let y = y0; y < y1; y++) {
        for (let x = x0; x < x1; x++) {
          const place = y * width + x;
          sums[place] = (Number.isNaN(sums[place]) ? 0 : sums[place]) + share * matrix.weight[entry];
        }
      }
    }
  }
  for (let place = 0; place < sums.length; place++) {
    if (Number.isNaN(sums[place]) || (!matrix.signed && pixels[place] > sums[place])) continue;
    pixels[place] = sums[place];
  }
  return pixels;
}

/** Return the first pixel of a cell and the pixel after its last. */
function span(offset, cell, size) {
  const from = cell < 1 ? Math.floor(offset * cell) : Math.round(offset * cell);
  const to = cell < 1 ? from + 1 : Math.round((offset + 1) * cell);
  return [Math.max(from, 0), Math.min(to, size)];
}

function paintTileBackground(pixels, {matrix, rows, columns, tiles}, view, width, height, ratio) {
  const {queryUnits, keyUnits, visibility} = matrix;
  const queryTokens = queryUnits.of.length;
  const keyTokens = keyUnits.of.length;
  const keyOfPixel = Int32Array.from({length: width}, (_, x) => {
    const key = columns[Math.floor(view.left + x / ratio / view.cellX)];
    return key === undefined ? -1 : keyUnits.first[key];
  });
  const keysOfPixel = (Math.max(1 / (view.cellX * ratio), 1) * keyTokens) / keyUnits.count;
  const part = Math.min((keysOfPixel * tiles.columns) / keyTokens, 1);
  for (let y = 0; y < height; y++) {
    const query = rows[Math.floor(view.top + y / ratio / view.cellY)];
    if (query === undefined) continue;
    const start = tileOf(queryUnits.first[query], queryTokens, tiles.rows) * tiles.columns;
    const lastToken = queryUnits.first[query + 1] - 1;
    for (let run = visibility.first[lastToken]; run < visibility.first[lastToken + 1]; run++) {
      for (let x = 0; x < width; x++) {
        const key = keyOfPixel[x];
        if (key < visibility.start[run] || key >= visibility.stop[run]) continue;
        pixels[y * width + x] = part * tiles.weights[start + tileOf(key, keyTokens, tiles.columns)];
      }
    }
  }
}

/** Return the row or column of tiles that a token belongs to. */
export function tileOf(token, tokens, tiles) {
  return Math.floor((token * tiles) / tokens);
}

/** Return the average weight in the tile of a query and a key. */
export function tileAverage({matrix, tiles}, query, key) {
  const {queryUnits, keyUnits} = matrix;
  const row = tileOf(queryUnits.first[query], queryUnits.of.length, tiles.rows);
  const column = tileOf(keyUnits.first[key], keyUnits.of.length, tiles.columns);
  return (tiles.weights[row * tiles.columns + column] * tiles.columns) / keyUnits.of.length;
}

/** Return the part of the colour scale for a weight, from 0 to 1; for a negative difference, from -1. */
export function scalePart(weight, largest, scale) {
  const part = Math.min(Math.abs(weight) / largest, 1);
  return Math.sign(weight) * (scale === "root" ? Math.sqrt(part) : part);
}
