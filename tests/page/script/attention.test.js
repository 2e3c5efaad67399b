import assert from "node:assert/strict";
import {test} from "node:test";
import {
  columnOf,
  hiddenShare,
  isVisible,
  receivedAttention,
  rowOf,
  shownRows,
  unitMatrix,
  unlistedBound,
  weightAt,
} from "../../../src/headwise/page/script/attention.js";
import {parseSparse, parseVisibility} from "../../../src/headwise/page/script/decode.js";
import {formatAtMost} from "../../../src/headwise/page/script/dom.js";
import {activeWeights, readoutSentence, strongestWords} from "../../../src/headwise/page/script/readout.js";
import {strongestLinks} from "../../../src/headwise/page/script/strongest.js";
import {hiddenUnits, unitsOf} from "../../../src/headwise/page/script/words.js";
import {assertClose, everyCase, exactWeights, head} from "./cases.js";
import {randomNumbers, randomSide, sparseBytes, visibilityBytes} from "./oracle.js";

everyCase("rows, columns and single weights equal the brute force", ({matrix, units, expected}) => {
  for (let query = 0; query < units.count; query++) {
    const listed = [...expected[query].keys()].filter(key => expected[query][key] !== null);
    const {indices, weights} = rowOf(matrix, query);
    assert.deepEqual([...indices], listed);
    listed.forEach((key, place) => assertClose(weights[place], expected[query][key], `row ${query}, key ${key}`));
    for (let key = 0; key < units.count; key++) {
      const weight = weightAt(matrix, query, key);
      if (expected[query][key] === null) assert.equal(weight, null);
      else assertClose(weight, expected[query][key], "single weight");
    }
  }
  for (let key = 0; key < units.count; key++) {
    const {indices, weights} = columnOf(matrix, key);
    assert.deepEqual(
      [...indices],
      [...expected.keys()].filter(query => expected[query][key] !== null),
    );
    indices.forEach((query, place) => assertClose(weights[place], expected[query][key], `column ${key}`));
  }
});

everyCase("a key that no token of a word sees is not visible and not listed", ({matrix, units, side, seen}) => {
  for (let query = 0; query < units.count; query++) {
    for (let key = 0; key < units.count; key++) {
      const visible = seen.some(
        (row, token) => side.wordOf[token] === query && row.some((flag, other) => flag && side.wordOf[other] === key),
      );
      assert.equal(isVisible(matrix, query, key), visible);
      if (!visible) assert.equal(weightAt(matrix, query, key), null);
    }
  }
});

everyCase("received and hidden attention equal the brute force", ({matrix, units, expected}) => {
  for (const onlyGenerated of [false, true]) {
    const hidden = hiddenUnits(units, {special: true, first: false});
    const rows = shownRows(matrix, hidden, onlyGenerated);
    const counted = expected.filter(
      (row, query) =>
        row.some(weight => weight !== null) && !hidden[query] && (!onlyGenerated || units.generated[query]),
    );
    const received = receivedAttention(matrix, rows);
    let hiddenSum = 0;
    for (let key = 0; key < units.count; key++) {
      const mean = counted.reduce((sum, row) => sum + (row[key] ?? 0), 0) / counted.length;
      assertClose(received[key], mean, `received by ${key}`);
      if (hidden[key]) hiddenSum += mean;
    }
    assert.ok(Math.abs(hiddenShare(matrix, rows, hidden) - hiddenSum) < 1e-3);
  }
});

for (const causal of [true, false, "window"]) {
  for (const merged of [true, false]) {
    test(`bounds of weights hold: causal ${causal}, merged ${merged}`, () => {
      let tight = 0;
      for (let seed = 1; seed < 30; seed++) {
        const found = head({storage: "sparse", causal, merged, seed});
        const {matrix, units} = found;
        exactWeights(found).forEach((row, query) => {
          let unlisted = 0;
          for (let key = 0; key < units.count; key++) {
            if (row[key] === null) continue;
            const listed = weightAt(matrix, query, key);
            assert.ok((listed ?? 0) <= row[key] + 1e-7, "a listed weight is a lower bound");
            assert.ok(row[key] <= (listed ?? 0) + matrix.rest[query] + 1e-6, "with the rest it is an upper bound");
            if (listed !== null) continue;
            unlisted += row[key];
            const bound = unlistedBound(matrix, query, key);
            assert.ok(row[key] <= bound + 1e-7, `${row[key]} > ${bound}`);
            assert.ok(Number(formatAtMost(bound)) >= row[key]);
            tight += Number(bound < matrix.rest[query]);
          }
          assert.ok(unlisted <= matrix.unlisted[query] + 1e-6);
        });
      }
      assert.ok(tight > 0, "the smallest listed weight bounds some weights better than the rest of the row");
    });
  }
}

everyCase("links and readouts have no weight of 0 and no key that is not visible", ({matrix, units}) => {
  const zeros = {...matrix, weight: matrix.weight.map((weight, entry) => (entry % 2 ? weight : 0))};
  const hidden = new Uint8Array(units.count);
  const rows = shownRows(zeros, hidden, false);
  for (const {query, key, weight} of strongestLinks(zeros, rows, hidden, 500).links)
    assert.ok(weight > 0 && isVisible(matrix, query, key));
  for (let unit = 0; unit < units.count; unit++) {
    const active = {axis: "query", unit};
    const shown = {rows, hiddenKeys: hidden};
    const strongest = strongestWords(activeWeights(zeros, active, shown), 500);
    assert.ok(strongest.every(({weight}) => weight > 0));
    assert.doesNotMatch(readoutSentence(zeros, active, shown), / 0\.00(?!\d)/);
  }
});

test("a listed key that is not visible is ignored", () => {
  const side = randomSide(3, randomNumbers(1));
  const plain = unitsOf({...side, wordOf: [0, 1, 2], words: ["a", "b", "c"]}, false);
  const visibility = parseVisibility(
    visibilityBytes([
      [1, null, null],
      [0.5, 0.5, null],
      [0.5, null, 0.5],
    ]),
    3,
  );
  const {buffer} = sparseBytes(
    [
      [0.5, 0.25, 0.25],
      [0.2, 0.3, 0.5],
      [0.1, 0.5, 0.4],
    ],
    3,
  );
  const matrix = unitMatrix(parseSparse(buffer, 3, 3), visibility, plain, plain);
  assert.deepEqual([...rowOf(matrix, 0).indices], [0]);
  assert.deepEqual([...rowOf(matrix, 1).indices], [0, 1]);
  assert.deepEqual([...rowOf(matrix, 2).indices], [0, 2]);
});
