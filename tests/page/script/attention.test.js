import assert from "node:assert/strict";
import {test} from "node:test";
import {
  columnOf,
  hiddenShare,
  isVisible,
  receivedAttention,
  rowOf,
  shownRows,
  strongestLinks,
  unitMatrix,
  unlistedBound,
  weightAt,
} from "../../../src/headwise/page/script/attention.js";
import {parseDense, parseSparse, parseVisibility} from "../../../src/headwise/page/script/decode.js";
import {focusOf, focusVerdict, rankedScores} from "../../../src/headwise/page/script/focus.js";
import {hiddenUnits, unitsOf} from "../../../src/headwise/page/script/words.js";
import {
  denseBytes,
  randomNumbers,
  randomSide,
  randomWeights,
  sparseBytes,
  visibilityBytes,
  wordWeights,
} from "./oracle.js";

const CASES = [];
for (const storage of ["dense", "sparse"]) {
  for (const causal of [true, false, "window"])
    for (const merged of [true, false])
      for (let seed = 1; seed <= 5; seed++) CASES.push({storage, causal, merged, seed});
}

function head({storage, causal, merged, seed}) {
  const random = randomNumbers(seed);
  const tokens = 19 + seed;
  const side = randomSide(tokens, random, 11);
  const weights = randomWeights(tokens, tokens, random, causal);
  const seen = weights.map(row => row.map(weight => weight !== null));
  const {buffer, stored, totals} = storage === "dense" ? denseBytes(weights) : sparseBytes(weights, 4);
  const visibility = parseVisibility(visibilityBytes(weights), tokens);
  const units = unitsOf(side, merged);
  const matrix = unitMatrix(
    (storage === "dense" ? parseDense : parseSparse)(buffer, tokens, tokens),
    visibility,
    units,
    units,
  );
  const plain = merged ? side : {...side, words: side.tokens, wordOf: side.tokens.map((_, token) => token)};
  return {side: plain, matrix, units, weights, seen, totals, expected: wordWeights(stored, plain, plain, seen)};
}

function assertClose(actual, expected, message) {
  assert.ok(Math.abs(actual - expected) < 1e-6, `${message}: ${actual} instead of ${expected}`);
}

function everyCase(name, check) {
  for (const parameters of CASES)
    test(`${name}: ${JSON.stringify(parameters)}`, () => check(head(parameters), parameters));
}

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

everyCase("links are the largest weights between two words, and their share is counted", found => {
  const {matrix, units, expected, seen} = found;
  const seesOnlyItself = seen[0].filter(Boolean).length === 1;
  for (const first of [true, false]) {
    const hidden = hiddenUnits(units, {special: false, first});
    const rows = shownRows(matrix, hidden, false);
    const isWord = unit => !units.special[unit] && !/^,$/.test(units.labels[unit]);
    const skipsFirst = seesOnlyItself && !first;
    const all = [];
    let shown = 0;
    let onFirst = 0;
    expected.forEach((row, query) => {
      if (!rows[query]) return;
      shown += matrix.rest[query];
      row.forEach((weight, key) => {
        if (weight === null || hidden[key]) return;
        shown += weight;
        if (skipsFirst && key === 0) onFirst += weight;
        else if (isWord(query) && isWord(key) && query !== key) all.push(weight);
      });
    });
    const largest = all.sort((a, b) => b - a).slice(0, 7);
    const result = strongestLinks(matrix, rows, hidden, 7);
    assert.equal(result.links.length, largest.length);
    result.links.forEach((link, place) => {
      assertClose(link.weight, largest[place], `link ${place}`);
      assert.equal(Math.fround(link.weight), weightAt(matrix, link.query, link.key));
    });
    assert.ok(Math.abs(result.covered - largest.reduce((sum, weight) => sum + weight, 0) / shown) < 1e-5);
    if (skipsFirst) assert.ok(Math.abs(result.onFirst - onFirst / shown) < 1e-5);
    else assert.equal(result.onFirst, null);
  }
});

everyCase("the focus of marked words equals the brute force", ({matrix, units, side, seen, expected}) => {
  const marked = new Set([2, 4, units.count - 2]);
  const ratio = (query, targets) => {
    const tokens = [...side.wordOf.keys()].filter(token => side.wordOf[token] === query && seen[token].includes(true));
    return (
      tokens.reduce(
        (sum, token) =>
          sum +
          seen[token].filter((flag, key) => flag && targets.has(side.wordOf[key])).length /
            seen[token].filter(Boolean).length,
        0,
      ) / tokens.length
    );
  };
  for (const kind of ["received", "exchanged"]) {
    const rows = [...expected.keys()].filter(
      query =>
        !units.special[query] &&
        expected[query].some(weight => weight !== null) &&
        marked.has(query) === (kind === "exchanged"),
    );
    const results = rows
      .map(query => {
        const targets = new Set([...marked].filter(word => kind === "received" || word !== query));
        return {
          uniform: ratio(query, targets),
          share: [...targets].reduce((sum, key) => sum + (expected[query][key] ?? 0), 0),
        };
      })
      .filter(({uniform}) => kind === "received" || uniform > 0);
    const focus = focusOf(matrix, marked, kind);
    if (!results.length) {
      assert.equal(focus, null);
      continue;
    }
    assert.equal(focus.rows, results.length);
    assertClose(focus.share, results.reduce((sum, each) => sum + each.share, 0) / results.length, `${kind} share`);
    assertClose(
      focus.uniform,
      results.reduce((sum, each) => sum + each.uniform, 0) / results.length,
      `${kind} uniform`,
    );
  }
});

test("the bound of an unlisted weight holds", () => {
  for (let seed = 1; seed < 20; seed++) {
    const {matrix, units, weights, side} = head({storage: "sparse", causal: true, merged: true, seed});
    const exact = wordWeights(
      weights,
      side,
      side,
      weights.map(row => row.map(weight => weight !== null)),
    );
    for (let query = 0; query < units.count; query++) {
      for (let key = 0; key < units.count; key++) {
        if (weightAt(matrix, query, key) === null && exact[query][key] !== null) {
          assert.ok(
            exact[query][key] <= unlistedBound(matrix, query, key) + 0.01 + 4 * 0.0031,
            `${exact[query][key]} > ${unlistedBound(matrix, query, key)}`,
          );
        }
      }
    }
  }
});

test("the verdict names the head with the largest excess", () => {
  const score = (head, share, uniform) => ({head, focus: {share, uniform, rows: 3, exact: true}});
  const format = number => number.toFixed(2);
  const name = head => `3.${head}`;
  const ranked = rankedScores([score(4, 0.31, 0.12), score(5, 0.3, 0.01), {head: 6, focus: null}]);
  assert.deepEqual(
    ranked.map(({head}) => head),
    [5, 4],
  );
  assert.equal(
    focusVerdict(ranked, name, format),
    "No head puts half of its attention on these words; the largest excess is that of head 3.5, with a share of 0.30 where " +
      "uniform attention has 0.01.",
  );
  assert.match(focusVerdict([score(1, 0.6, 0.1), ...ranked], name, format), /^One head puts at least half/);
});

test("settings hide special tokens and the first word", () => {
  const units = {...unitsOf(randomSide(9, randomNumbers(1)), false), special: Uint8Array.of(0, 0, 1, 0, 0, 0, 0, 0, 1)};
  const hidden = settings =>
    [...hiddenUnits(units, settings).keys()].filter(unit => hiddenUnits(units, settings)[unit]);
  assert.deepEqual(hidden({special: false, first: false}), []);
  assert.deepEqual(hidden({special: true, first: false}), [2, 8]);
  assert.deepEqual(hidden({special: true, first: true}), [0, 2, 8]);
});
