import assert from "node:assert/strict";
import {test} from "node:test";
import {
  cellAt,
  fittedView,
  isFitted,
  matrixGrid,
  pannedView,
  pixelWeights,
  scalePart,
  zoomedView,
} from "../../../src/headwise/page/script/matrix.js";
import {niceStep} from "../../../src/headwise/page/script/matrixpaint.js";
import {resampled} from "../../../src/headwise/page/script/thumbnail.js";
import {tilesOf} from "../../../src/headwise/page/script/tiles.js";
import {parseDense, parseVisibility} from "../../../src/headwise/page/script/decode.js";
import {unitMatrix} from "../../../src/headwise/page/script/attention.js";
import {unitsOf} from "../../../src/headwise/page/script/words.js";
import {denseBytes, randomNumbers, randomSide, randomWeights, visibilityBytes} from "./oracle.js";

const BOUNDS = {rows: 30, columns: 20, width: 400, height: 300};

test("zooming keeps the cell under the pointer, and the view stays inside the matrix", () => {
  let view = fittedView(BOUNDS);
  assert.deepEqual(cellAt(view, BOUNDS, 399, 299), {row: 29, column: 19});
  const before = cellAt(view, BOUNDS, 210, 155);
  view = zoomedView(view, BOUNDS, 210, 155, 1.8);
  assert.deepEqual(cellAt(view, BOUNDS, 210, 155), before);
  for (let i = 0; i < 30; i++) view = pannedView(zoomedView(view, BOUNDS, 10, 290, 1.3), BOUNDS, -500, -700);
  assert.ok(view.left + BOUNDS.width / view.cellX <= 20 + 1e-9 && view.top + BOUNDS.height / view.cellY <= 30 + 1e-9);
  assert.ok(view.cellX <= 64);
  for (let i = 0; i < 30; i++) view = zoomedView(view, BOUNDS, 300, 20, 0.5);
  assert.deepEqual(view, fittedView(BOUNDS));
  assert.equal(cellAt(view, BOUNDS, -1, 5), null);
});

test("a view is fitted until it is zoomed", () => {
  const view = fittedView(BOUNDS);
  assert.ok(isFitted(view, BOUNDS));
  assert.ok(!isFitted(zoomedView(view, BOUNDS, 10, 10, 1.2), BOUNDS));
  assert.ok(!isFitted(view, {...BOUNDS, width: 200}));
  assert.deepEqual(
    [0.25, -0.25, -2].map(weight => scalePart(weight, 1, "root")),
    [0.5, -0.5, -1],
  );
});

function denseGrid(tokens, causal) {
  const random = randomNumbers(9);
  const side = randomSide(tokens, random);
  const weights = randomWeights(tokens, tokens, random, causal);
  const units = unitsOf(side, false);
  const matrix = unitMatrix(
    parseDense(denseBytes(weights).buffer, tokens, tokens),
    parseVisibility(visibilityBytes(weights), tokens),
    units,
    units,
  );
  const all = [...units.labels.keys()];
  return {weights, grid: matrixGrid(matrix, all, all, null)};
}

test("each pixel of a large cell has the weight of the cell, and NaN where no key is visible", () => {
  const {weights, grid} = denseGrid(8, true);
  const bounds = {rows: 8, columns: 8, width: 80, height: 80};
  const pixels = pixelWeights(grid, fittedView(bounds), 80, 80, 1);
  for (let y = 0; y < 80; y++) {
    for (let x = 0; x < 80; x++) {
      const weight = weights[Math.floor(y / 10)][Math.floor(x / 10)];
      const pixel = pixels[y * 80 + x];
      if (weight === null) assert.ok(Number.isNaN(pixel));
      else assert.ok(Math.abs(pixel - weight) < 1e-4);
    }
  }
});

test("a pixel that covers several cells has the sum over its keys and the mean over its queries", () => {
  const {weights, grid} = denseGrid(40, false);
  const bounds = {rows: 40, columns: 40, width: 10, height: 10};
  const pixels = pixelWeights(grid, fittedView(bounds), 10, 10, 1);
  for (let y = 0; y < 10; y++) {
    for (let x = 0; x < 10; x++) {
      let sum = 0;
      for (let row = 4 * y; row < 4 * y + 4; row++)
        for (let key = 4 * x; key < 4 * x + 4; key++) sum += weights[row][key] ?? 0;
      assert.ok(Math.abs((pixels[y * 10 + x] || 0) - sum / 4) < 1e-4);
    }
  }
});

test("a thumbnail counts every row and column by its area", () => {
  const identity = Float32Array.from({length: 49}, (_, place) => Number(place % 8 === 0));
  for (const size of [5, 7, 11, 28]) {
    const picture = resampled(tilesOf(7, 7, 21, 14, identity), size, size);
    const sum = picture.reduce((a, b) => a + b, 0);
    assert.ok(Math.abs(sum / size ** 2 - 1 / 7) < 1e-6);
    for (let row = 0; row < size; row++)
      assert.ok(picture.subarray(row * size, (row + 1) * size).some(value => value > 0));
  }
});

test("steps of the axis are round numbers", () => {
  assert.deepEqual([1, 2, 3, 7, 11, 120].map(niceStep), [1, 2, 5, 10, 20, 200]);
});
