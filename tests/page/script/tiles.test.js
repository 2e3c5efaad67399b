import assert from "node:assert/strict";
import {test} from "node:test";
import {isVisible, weightAt} from "../../../src/headwise/page/script/attention.js";
import {cellWeights, matrixGrid, pixelWeights} from "../../../src/headwise/page/script/matrix.js";
import {resampled} from "../../../src/headwise/page/script/thumbnail.js";
import {tileAverage, tileOf, tileSizes, tilesOf} from "../../../src/headwise/page/script/tiles.js";
import {assertClose, everyCase, head} from "./cases.js";

/** Return the tiles of token weights: means over the queries of a row of sums over the keys of a column. */
function pooled(weights, rows, columns) {
  const tokens = weights.length;
  const tiles = new Float32Array(rows * columns);
  const group = (token, groups) => Math.floor((token * groups) / tokens);
  const size = row => weights.filter((_, query) => group(query, rows) === row).length;
  weights.forEach((line, query) =>
    line.forEach((weight, key) => {
      const row = group(query, rows);
      tiles[row * columns + group(key, columns)] += (weight ?? 0) / size(row);
    }),
  );
  return tilesOf(rows, columns, tokens, tokens, tiles);
}

/** Return the mean of all weights between the tokens of a tile. */
function tileMean(weights, rows, columns, query, key) {
  const tokens = weights.length;
  const inTile = (token, other, groups) => tileOf(token, tokens, groups) === tileOf(other, tokens, groups);
  const of = weights
    .filter((_, other) => inTile(other, query, rows))
    .flatMap(line => line.filter((_, other) => inTile(other, key, columns)));
  return of.reduce((sum, weight) => sum + (weight ?? 0), 0) / of.length;
}

/** Return the weight of a cell of words if all weights in a tile were equal. */
function expectedAverage({weights, units}, rows, columns, query, key) {
  const tokensOf = unit => [...units.of.keys()].filter(token => units.of[token] === unit);
  const queries = tokensOf(query);
  const sums = queries.map(row => tokensOf(key).reduce((sum, k) => sum + tileMean(weights, rows, columns, row, k), 0));
  return sums.reduce((a, b) => a + b, 0) / queries.length;
}

function gridOf({matrix, units, weights}, rows, columns) {
  const all = [...units.labels.keys()];
  return matrixGrid(matrix, all, all, pooled(weights, rows, columns));
}

test("the sizes of tiles are those of their tokens", () => {
  for (const [tokens, tiles] of [[102, 64], [98, 64], [64, 64], [7, 7], [2048, 64], [129, 64]]) {
    const sizes = tileSizes(tokens, tiles);
    assert.equal(sizes.reduce((a, b) => a + b, 0), tokens);
    for (let tile = 0; tile < tiles; tile++)
      assert.equal(sizes[tile], [...Array(tokens).keys()].filter(token => tileOf(token, tokens, tiles) === tile).length);
  }
});

everyCase("the average of a tile is the mean of its weights", (random, {merged}) => {
  const {count} = random.units;
  for (const [rows, columns] of [[13, 17], [count, 7]]) {
    const grid = gridOf(random, rows, columns);
    for (let query = 0; query < count; query += 2) {
      for (let key = 0; key < count; key++)
        assertClose(
          tileAverage(grid, query, key),
          expectedAverage(random, rows, columns, query, key),
          `${merged ? "word" : "token"} ${query}, ${key}`,
        );
    }
  }
});

everyCase("a cell has its listed weight, the average of its tile, or NaN if it is not visible", (random, {storage}) => {
  const grid = gridOf(random, 13, 17);
  const {matrix} = grid;
  const weightsOf = cellWeights(grid);
  const {length} = grid.rows;
  const bounds = {left: 0, top: 0, cellX: 3, cellY: 5};
  const pixels = pixelWeights(grid, bounds, 3 * length, 5 * length, 1);
  for (let query = 0; query < length; query++) {
    const weights = weightsOf(query);
    for (let key = 0; key < length; key++) {
      const listed = weightAt(matrix, query, key);
      if (listed !== null) assert.equal(weights[key], listed);
      else if (!isVisible(matrix, query, key)) assert.ok(Number.isNaN(weights[key]));
      else assertClose(weights[key], tileAverage(grid, query, key), `cell of ${storage} weights`);
      assert.deepEqual(pixels[(5 * query + 2) * 3 * length + 3 * key + 1], weights[key]);
    }
  }
});

test("a pixel that covers several cells has at least the weight of its tiles", () => {
  const random = head({storage: "sparse", causal: false, merged: false, seed: 5});
  const grid = gridOf(random, 12, 12);
  const [pixel] = pixelWeights(grid, {left: 0, top: 0, cellX: 1 / 24, cellY: 1 / 24}, 1, 1, 1);
  const listed = random.matrix.weight.reduce((a, b) => a + b, 0) / 24;
  assert.ok(listed < 0.85 && pixel > 0.9, `${pixel}, ${listed} listed`);
});

test("the thumbnail of uniform attention has no stripes", () => {
  for (const tokens of [65, 98, 102, 127]) {
    const uniform = Array.from({length: tokens}, () => Array(tokens).fill(1 / tokens));
    const picture = resampled(pooled(uniform, 64, 64), 40, 40);
    for (const weight of picture) assertClose(weight, 1 / 64, `thumbnail of ${tokens} tokens`);
  }
});
