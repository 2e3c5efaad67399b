import assert from "node:assert/strict";
import {test} from "node:test";
import {isVisible, rowOf, shownRows, weightAt} from "../../../src/headwise/page/script/attention.js";
import {cellText, tilesNote} from "../../../src/headwise/page/script/celltext.js";
import {differenceMatrix} from "../../../src/headwise/page/script/difference.js";
import {
  formatAtLeast,
  formatAtMost,
  formatBound,
  formatNumber,
  formatPercentAtLeast,
  formatShort,
  formatSigned,
  formatWeight,
} from "../../../src/headwise/page/script/dom.js";
import {linksText, weightsText} from "../../../src/headwise/page/script/export.js";
import {matrixGrid} from "../../../src/headwise/page/script/matrix.js";
import {tilesOf} from "../../../src/headwise/page/script/tiles.js";
import {activeWeights, strongestWords} from "../../../src/headwise/page/script/readout.js";
import {
  beginning,
  differingParts,
  directionOf,
  hiddenUnits,
  plainName,
  quotedName,
  shortened,
  unitName,
  unitsOf,
} from "../../../src/headwise/page/script/words.js";
import {assertClose, exactWeights, head} from "./cases.js";
import {randomNumbers, randomSide} from "./oracle.js";

test("names of punctuation are in quotes", () => {
  const side = {...randomSide(5, () => 0.5), tokens: ["[SEP]", "tea", ",", "tea", "?"], special: [1, 0, 0, 0, 0]};
  const units = unitsOf(side, false);
  assert.deepEqual(
    [0, 1, 2, 3, 4].map(unit => unitName(units, unit)),
    ["[SEP]", "tea (2)", "“,”", "tea (4)", "“?”"],
  );
  assert.deepEqual(
    [1, 2].map(unit => quotedName(units, unit)),
    ["“tea (2)”", "“,”"],
  );
  assert.equal(plainName(units, 2), ",");
});

test("patches are named by their row and column", () => {
  const side = {
    ...randomSide(3, () => 0.5),
    tokens: ["token 0", "(5, 14)", "(1, 1)"],
    pictures: [{name: "picture 1"}],
    patches: [null, [0, 0, 0, 0.5, 1], null],
  };
  assert.deepEqual([...unitsOf(side, false).labels], ["token 0", "row 5, column 14", "(1, 1)"]);
  const two = {...side, pictures: [{name: "picture $1"}, {name: "picture 2"}]};
  assert.deepEqual([...unitsOf(two, false).labels], ["token 0", "picture $1 (5, 14)", "(1, 1)"]);
});

test("a long text is cut between words", () => {
  assert.equal(beginning("Coffee or tea?", 20), "Coffee or tea?");
  assert.equal(beginning("Which do you like better", 15), "Which do you…");
  assert.equal(beginning("Donaudampfschifffahrt", 10), "Donaudampf…");
});

test("texts are cut between characters as readers see them", () => {
  const family = "👨\u200d👩\u200d👧";
  assert.equal(beginning(`ab${family}cd`, 3), `ab${family}…`);
  assert.equal(shortened(family.repeat(10), 10), family.repeat(10));
  assert.equal(shortened(family.repeat(30), 10), `${family.repeat(6)}…${family.repeat(3)}`);
  assert.equal(shortened("e\u0301".repeat(30), 10), `${"e\u0301".repeat(6)}…${"e\u0301".repeat(3)}`);
  assert.equal(shortened("x".repeat(10_000), 10), "xxxxxx…xxx");
});

test("a line has the direction of most of its words", () => {
  assert.equal(directionOf(["Python", "هي", "لغة"]), "rtl");
  assert.equal(directionOf(["שלום", "is", "a", "word"]), "ltr");
  assert.equal(directionOf(["She", "said", "שלום"]), "ltr");
  assert.equal(directionOf(["שלום", "2024", "!", "yes"]), "rtl");
  assert.equal(directionOf(["2024", "!"]), "ltr");
  assert.equal(directionOf([]), "ltr");
});

test("names of words that are written from right to left do not change the order of a sentence", () => {
  const side = {...randomSide(3, () => 0.5), tokens: ["שלום", "tea", "שלום"], special: [0, 0, 0]};
  const units = unitsOf(side, false);
  assert.equal(unitName(units, 0), "\u2068שלום\u2069 (1)");
  assert.equal(plainName(units, 0), "שלום (1)");
  assert.equal(quotedName(units, 1), "“tea”");
});

test("models are named by the words in which their names differ", () => {
  for (const [a, b, ...parts] of [
    ["SmolLM2-135M-Instruct", "SmolLM2-360M-Instruct", "135M", "360M"],
    ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-pruned", "Instruct", "Instruct-pruned"],
    ["bert, on 3 texts", "bert, on 4 texts", "3 texts", "4 texts"],
    ["org/a/model", "org/b/model", "a", "b"],
    ["gpt2", "llama", "gpt2", "llama"],
    ["same", "same", "same", "same"],
  ])
    assert.deepEqual(differingParts(a, b), parts);
});

test("copied weights of a page with the largest weights are rounded down, and say so", () => {
  for (const storage of ["sparse", "dense"]) {
    const found = head({storage, causal: true, merged: true, seed: 3});
    const hidden = new Uint8Array(found.units.count);
    const shown = {rows: shownRows(found.matrix, hidden, false), hiddenQueries: hidden, hiddenKeys: hidden};
    const exact = exactWeights(found);
    const names = [...found.units.labels.keys()].map(unit => plainName(found.units, unit));
    for (const text of [
      weightsText({state: {get: () => ""}}, {matrix: found.matrix, shown}),
      linksText({matrix: found.matrix, shown}),
    ]) {
      const lines = text.split("\n");
      if (storage === "sparse") assert.match(lines.shift(), /^# Each weight shown may be up to 0\.007 too small\./);
      assert.equal(lines.shift(), "query\tkey\tweight");
      assert.ok(lines.length > 5);
      for (const line of lines) {
        const [query, key, weight] = line.split("\t");
        assert.match(weight, storage === "sparse" ? /^\d\.\d{3}$/ : /^\d\.\d{4}$/);
        const truth = exact[names.indexOf(query)][names.indexOf(key)];
        assert.ok(storage === "dense" ? Math.abs(Number(weight) - truth) < 1e-4 : Number(weight) <= truth + 1e-7);
      }
    }
  }
});

test("the tooltip of the matrix encloses the true weight", () => {
  for (let seed = 1; seed < 10; seed++) {
    const found = head({storage: "sparse", causal: true, merged: true, seed});
    const all = [...found.units.labels.keys()];
    const grid = matrixGrid(found.matrix, all, all, null);
    exactWeights(found).forEach((row, query) =>
      row.forEach((weight, key) => {
        const text = cellText(grid, query, key);
        const [, bound, number] = /: (?:not stored, )?(at least |at most |≥ )([\d.]+)$/.exec(text) ?? [];
        if (weight === null) assert.match(text, /: not visible$/);
        else if (bound === "at most ") assert.ok(Number(number) >= weight, `${number} < ${weight}`);
        else assert.ok(Number(number) <= weight + 1e-6, text);
      }),
    );
  }
});

test("the tooltip of a cell that is not stored explains the mean of its tile", () => {
  const found = head({storage: "sparse", causal: false, merged: false, seed: 3});
  const all = [...found.units.labels.keys()];
  const grid = matrixGrid(found.matrix, all, all, tilesOf(1, 1, all.length, all.length, Float32Array.of(1)));
  const key = all.find(unit => weightAt(found.matrix, 2, unit) === null && isVisible(found.matrix, 2, unit));
  assert.match(
    cellText(grid, 2, key),
    /: not stored, at most 0\.\d{3}\. The mean weight of the tile around it is 0\.0\d\.$/,
  );
  assert.equal(
    tilesNote(matrixGrid(head({storage: "dense", causal: false, merged: false, seed: 3}).matrix, all, all, grid.tiles)),
    "",
  );
  assert.match(
    tilesNote(grid),
    /Every other cell has the mean weight of the tile around it, a square of about 22 by 22 words\.$/,
  );
});

test("the difference of two matrices is B minus A in every cell", () => {
  for (const storage of ["dense", "sparse"]) {
    const [a, b] = [5, 5].map((seed, place) => {
      const found = head({storage, causal: true, merged: true, seed});
      return place
        ? {...found.matrix, weight: found.matrix.weight.map((weight, entry) => (entry % 3 ? weight : 0))}
        : found.matrix;
    });
    const units = a.queryUnits;
    const matrix = differenceMatrix(a, b);
    for (let query = 0; query < units.count; query++) {
      for (let key = 0; key < units.count; key++) {
        const [before, after] = [a, b].map(each => weightAt(each, query, key));
        if (before === null && after === null) assert.equal(weightAt(matrix, query, key), null);
        else assertClose(weightAt(matrix, query, key), (after ?? 0) - (before ?? 0), "difference");
      }
    }
    const strongest = strongestWords(
      activeWeights(matrix, {axis: "query", unit: 3}, {rows: matrix.visible, hiddenKeys: new Uint8Array(units.count)}),
    );
    assert.ok(strongest.length && strongest.every(({weight}) => weight < 0));
    const all = [...units.labels.keys()];
    const query = [...a.visible.keys()].findLast(unit => a.visible[unit]);
    const text = cellText(matrixGrid(matrix, all, all, null), query, rowOf(a, query).indices[0], "B − A");
    assert.match(
      text,
      storage === "dense" ? /^B − A, .*: (\+|−|≈)?[\d.]+ \(A \S+, B \S+\)$/ : /^B − A, .*: not exactly known \(A /,
    );
  }
});

test("numbers are rounded so that they stay bounds, and small weights are not shown as 0.00", () => {
  assert.deepEqual([0, 0.0049, 0.005, 0.33, 1e-9].map(formatWeight), ["0.00", "<0.01", "0.01", "0.33", "<0.01"]);
  assert.deepEqual([0, 1e-5, 0.0049, 0.0199, Math.fround(0.33), 0.999, 1, -0.484].map(formatAtLeast), [
    "0.00",
    ">0",
    "0.004",
    "0.01",
    "0.33",
    "0.99",
    "1.00",
    "−0.49",
  ]);
  assert.deepEqual([-0.01, 0, 1e-5, 0.33001].map(formatBound), ["unknown", "≥ 0", "≥ 0", "at least 0.33"]);
  assert.deepEqual([0, 0.12, -0.128, 0.001, -0.001].map(formatSigned), ["0.00", "+0.12", "−0.13", "+0.001", "−0.001"]);
  assert.deepEqual([-1e-9, -0.0003, -0.01].map(formatNumber), ["0.00", "−0.0003", "−0.01"]);
  assert.deepEqual([0.0007, -0.00996].map(formatShort), ["0.001", "−0.01"]);
  assert.deepEqual([0, -0.0003, -0.003, 0.25, -1234, 12_345, -2_345_678, NaN].map(formatShort), [
    "0.00",
    "≈0",
    "−0.003",
    "0.25",
    "−1,234",
    "12K",
    "−2.3M",
    "–",
  ]);
  assert.deepEqual([0, 1e-5, 0.33001, 0.5].map(formatAtMost), ["0.000", "0.001", "0.331", "0.500"]);
  assert.deepEqual([0, 0.0049, 0.339, 1].map(formatPercentAtLeast), ["0 %", "0.4 %", "33 %", "100 %"]);
});

test("settings hide special tokens and the first word", () => {
  const units = {...unitsOf(randomSide(9, randomNumbers(1)), false), special: Uint8Array.of(0, 0, 1, 0, 0, 0, 0, 0, 1)};
  const hidden = settings =>
    [...hiddenUnits(units, settings).keys()].filter(unit => hiddenUnits(units, settings)[unit]);
  assert.deepEqual(hidden({special: false, first: false}), []);
  assert.deepEqual(hidden({special: true, first: false}), [2, 8]);
  assert.deepEqual(hidden({special: true, first: true}), [0, 2, 8]);
});
