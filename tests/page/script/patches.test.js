import assert from "node:assert/strict";
import {test} from "node:test";
import {neighbourOf, rectangleBetween, shownPatches, unitsInside} from "../../../src/headwise/page/script/patches.js";
import {randomNumbers} from "./oracle.js";

/** Return the patches of a grid of a picture, each enlarged by a factor around its centre and cut at the border. */
function grid(picture, rows, columns, factor = 1) {
  return Array.from({length: rows * columns}, (_, place) => {
    const [row, column] = [Math.floor(place / columns), place % columns];
    const edges = (index, count) => [
      Math.max((index + 0.5 - factor / 2) / count, 0),
      Math.min((index + 0.5 + factor / 2) / count, 1),
    ];
    const [[left, right], [top, bottom]] = [edges(column, columns), edges(row, rows)];
    return [picture, left, top, right - left, bottom - top];
  });
}

test("patches that do not overlap are shown as they are", () => {
  const patches = [null, ...grid(0, 2, 3), null, ...grid(1, 3, 2)];
  assert.deepEqual(shownPatches({pictures: [{}, {}], patches}), patches);
});

test("each point of a picture has the colour of at most one of the patches that overlap, and it is in this patch", () => {
  for (const factor of [1.3, 2.5, 4]) {
    const patches = [...grid(0, 5, 7, factor), null, ...grid(1, 2, 3)];
    const shown = shownPatches({pictures: [{}, {}], patches});
    const random = randomNumbers(3);
    const contains = ([, left, top, width, height], x, y) => x > left && x < left + width && y > top && y < top + height;
    for (let point = 0; point < 500; point++) {
      const [x, y] = [random(), random()];
      const at = [...Array(35).keys()].filter(token => contains(shown[token], x, y));
      assert.equal(at.length, 1);
      assert.ok(contains(patches[at[0]], x, y));
    }
    assert.deepEqual(shown.slice(35), patches.slice(35));
  }
});

test("a rectangle has the patches whose centres are inside, of one picture", () => {
  const units = {patches: [null, ...grid(0, 3, 5), null, ...grid(1, 3, 5)]};
  const rectangle = {left: 0.11, top: 0.2, right: 0.6, bottom: 0.84};
  const expected = [];
  for (let row = 0; row < 3; row++)
    for (let column = 0; column < 5; column++) {
      const [x, y] = [(column + 0.5) / 5, (row + 0.5) / 3];
      if (x >= 0.11 && x <= 0.6 && y >= 0.2 && y <= 0.84) expected.push(17 + 5 * row + column);
    }
  assert.deepEqual(unitsInside(units, 1, rectangle), expected);
  assert.ok(expected.length === 4 && expected[0] === 23);
  const between = rectangleBetween(units.patches[4], units.patches[12]);
  assert.deepEqual(unitsInside(units, 0, between), [2, 3, 4, 7, 8, 9, 12, 13, 14]);
});

test("arrow keys move to the next patch of the row or the column, and stop at the edge of the picture", () => {
  for (const factor of [1, 2.5]) {
    const units = {patches: [...grid(1, 2, 2), null, ...grid(0, 4, 6, factor)]};
    for (let row = 0; row < 4; row++)
      for (let column = 0; column < 6; column++) {
        const at = (r, c) => (r >= 0 && r < 4 && c >= 0 && c < 6 ? 5 + 6 * r + c : undefined);
        const next = key => neighbourOf(units, at(row, column), key);
        assert.equal(next("ArrowRight"), at(row, column + 1));
        assert.equal(next("ArrowLeft"), at(row, column - 1));
        if (factor > 1) continue; // the centres of patches that are cut at the border are closer
        assert.equal(next("ArrowDown"), at(row + 1, column));
        assert.equal(next("ArrowUp"), at(row - 1, column));
      }
  }
  const units = {patches: [null, ...grid(0, 2, 2)]};
  assert.equal(neighbourOf(units, 0, "ArrowDown"), undefined);
  assert.equal(neighbourOf(units, 1, "Home"), undefined);
});
