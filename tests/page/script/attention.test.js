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
import {parseDense, parseSparse, parseVisibility} from "../../../src/headwise/page/script/decode.js";
import {
  formatAtLeast,
  formatAtMost,
  formatBound,
  formatNumber,
  formatPercent,
  formatPercentAtLeast,
  formatShort,
  formatSigned,
  formatWeight,
} from "../../../src/headwise/page/script/dom.js";
import {linksText, weightsText} from "../../../src/headwise/page/script/export.js";
import {differenceMatrix} from "../../../src/headwise/page/script/difference.js";
import {focusOf, focusVerdict, hasFocus, rankedScores} from "../../../src/headwise/page/script/focus.js";
import {matrixGrid} from "../../../src/headwise/page/script/matrix.js";
import {cellText, tilesNote} from "../../../src/headwise/page/script/celltext.js";
import {activeWeights, readoutSentence, strongestWords} from "../../../src/headwise/page/script/readout.js";
import {strongestLinks} from "../../../src/headwise/page/script/strongest.js";
import {
  beginning,
  hiddenUnits,
  plainName,
  quotedName,
  unitName,
  unitsOf,
} from "../../../src/headwise/page/script/words.js";
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

everyCase("a link goes from a word to the word that it attends to most", ({matrix, units, expected, seen}) => {
  const seesOnlyItself = seen[0].filter(Boolean).length === 1;
  for (const first of [true, false]) {
    const hidden = hiddenUnits(units, {special: false, first});
    const rows = shownRows(matrix, hidden, false);
    const isWord = unit => !units.special[unit] && !/^,$/.test(units.labels[unit]);
    const skipsFirst = seesOnlyItself && !first;
    const best = expected.map((row, query) => {
      const keys = [...row.keys()].filter(
        key => row[key] !== null && isWord(key) && key !== query && !hidden[key] && !(skipsFirst && key === 0),
      );
      if (!rows[query] || !isWord(query) || !keys.length) return null;
      const key = keys.reduce((one, other) => (row[other] > row[one] ? other : one));
      return {key, weight: row[key]};
    });
    const links = [];
    best.forEach((link, query) => {
      if (!link) return;
      const other = best[link.key]?.key === query ? best[link.key].weight : 0;
      const isMutual = Math.min(other, link.weight) > 1 / units.count;
      if (isMutual && (other > link.weight || (other === link.weight && query > link.key))) return;
      if (link.weight >= 0.005) links.push({query, key: link.key, weight: link.weight, back: isMutual ? other : null});
    });
    links.sort((a, b) => Math.round(b.weight * 1e4) - Math.round(a.weight * 1e4) || a.query - b.query);
    const result = strongestLinks(matrix, rows, hidden, 7);
    assert.equal(result.links.length, Math.min(links.length, 7));
    result.links.forEach((link, place) => assertClose(link.weight, links[place].weight, `link ${place}`));
    for (const {query, key, weight, back} of strongestLinks(matrix, rows, hidden, 99).links) {
      assertClose(weight, best[query].weight, "largest weight of the query");
      assertClose(weightAt(matrix, query, key), weight, "weight of the key");
      assert.equal(back !== null, links.some(link => link.query === query && link.back !== null));
      if (back !== null) assertClose(back, best[key].weight, "weight back");
    }
    let shown = 0;
    expected.forEach((row, query) => {
      if (rows[query]) shown += matrix.rest[query] + row.reduce((sum, weight, key) => sum + (hidden[key] ? 0 : (weight ?? 0)), 0);
    });
    const covered = result.links.reduce((sum, link) => sum + link.weight + (link.back ?? 0), 0);
    assert.ok(Math.abs(result.covered - covered / shown) < 1e-5);
    if (!skipsFirst) assert.equal(result.onFirst, null);
    else assertClose(result.onFirst, expected.reduce((sum, row, query) => sum + (rows[query] ? (row[0] ?? 0) : 0), 0) / shown, "on the first");
  }
});

test("two words that attend most to each other share a link, and weights below 0.005 are no links", () => {
  const rows = [
    [0, 0.6, 0.4, 0],
    [0.5, 0.1, 0.4, 0],
    [0.004, 0.003, 0.9, 0.003],
    [0.1, 0.2, 0.3, 0.4],
  ];
  const side = {...randomSide(4, () => 0.5), words: ["a", "b", "c", "d"], tokens: ["a", "b", "c", "d"], special: [0, 0, 0, 0]};
  const units = unitsOf(side, false);
  const visibility = parseVisibility(visibilityBytes(rows), 4);
  const matrix = unitMatrix(parseDense(denseBytes(rows).buffer, 4, 4), visibility, units, units);
  const none = new Uint8Array(4);
  const {links} = strongestLinks(matrix, matrix.visible, none, 8);
  const rounded = weight => weight === null ? null : Number(weight.toFixed(2));
  assert.deepEqual(
    links.map(({query, key, weight, back}) => [query, key, rounded(weight), rounded(back)]),
    [[0, 1, 0.6, 0.5], [3, 2, 0.3, null]],
  );
  const copied = linksText({matrix, shown: {rows: matrix.visible, hiddenKeys: none}}).split("\n").slice(1);
  assert.deepEqual(copied.map(line => line.split("\t").slice(0, 2).join("")), ["ab", "ba", "dc"]);
});

test("names of punctuation are in quotes", () => {
  const side = {...randomSide(5, () => 0.5), tokens: ["[SEP]", "tea", ",", "tea", "?"], special: [1, 0, 0, 0, 0]};
  const units = unitsOf(side, false);
  assert.deepEqual([0, 1, 2, 3, 4].map(unit => unitName(units, unit)), ["[SEP]", "tea (2)", "“,”", "tea (4)", "“?”"]);
  assert.deepEqual([1, 2].map(unit => quotedName(units, unit)), ["“tea (2)”", "“,”"]);
  assert.equal(plainName(units, 2), ",");
});

test("patches are named by their row and column", () => {
  const side = {...randomSide(2, () => 0.5), tokens: ["token 0", "(5, 14)"], image: {}};
  assert.deepEqual([...unitsOf(side, false).labels], ["token 0", "row 5, column 14"]);
});

test("a long text is cut between words", () => {
  assert.equal(beginning("Coffee or tea?", 20), "Coffee or tea?");
  assert.equal(beginning("Which do you like better", 15), "Which do you…");
  assert.equal(beginning("Donaudampfschifffahrt", 10), "Donaudampf…");
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

/** Return attention between words without rounding, and between tokens without words of several tokens. */
function exactWeights({weights, side, seen}) {
  return wordWeights(weights, side, side, seen);
}

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

everyCase("bounds of the focus enclose the true focus, and decide it only if they can", (found, {storage}) => {
  const {matrix, units, side} = found;
  const exact = exactWeights(found);
  for (const words of [[2, 4], [1, 2, 3, 4, 5, 6], [0, 1, units.count - 2], [...Array(units.count - 2).keys()]]) {
    const marked = new Set(words);
    for (const kind of ["received", "exchanged"]) {
      const focus = focusOf(matrix, marked, kind);
      if (!focus) continue;
      const rows = [...exact.keys()].filter(
        query =>
          !units.special[query] &&
          exact[query].some(weight => weight !== null) &&
          marked.has(query) === (kind === "exchanged") &&
          (kind === "received" || sees(found, query, marked)),
      );
      const sum = (query, key) => (kind === "received" || key !== query ? (exact[query][key] ?? 0) : 0);
      const share = rows.reduce((all, query) => all + words.reduce((part, key) => part + sum(query, key), 0), 0) / rows.length;
      assert.equal(focus.rows, rows.length, side.name);
      assert.ok(focus.share <= share + (storage === "dense" ? 1e-4 : 1e-6));
      assert.ok(focus.upper >= share - (storage === "dense" ? 1e-4 : 1e-6));
      const truth = share >= 0.5 && share > focus.uniform + 1e-4;
      if (hasFocus(focus) === "yes") assert.ok(truth);
      if (hasFocus(focus) === "no") assert.ok(!truth);
      if (storage === "dense") assert.notEqual(hasFocus(focus), "unknown");
    }
  }
});

/** Return true if a token of a word sees a marked word other than this word. */
function sees({side, seen}, query, marked) {
  return [...side.wordOf.keys()].some(
    token =>
      side.wordOf[token] === query &&
      seen[token].some((flag, key) => flag && side.wordOf[key] !== query && marked.has(side.wordOf[key])),
  );
}

everyCase("links and readouts have no weight of 0 and no key that is not visible", ({matrix, units}) => {
  const zeros = {...matrix, weight: matrix.weight.map((weight, entry) => (entry % 2 ? weight : 0))};
  const hidden = new Uint8Array(units.count);
  const rows = shownRows(zeros, hidden, false);
  for (const {query, key, weight} of strongestLinks(zeros, rows, hidden, 500).links)
    assert.ok(weight > 0 && isVisible(matrix, query, key));
  for (let unit = 0; unit < units.count; unit++) {
    const active = {axis: "query", unit};
    const strongest = strongestWords(activeWeights(zeros, active, {rows, hiddenKeys: hidden}), 500);
    assert.ok(strongest.every(({weight}) => weight > 0));
    assert.doesNotMatch(readoutSentence(zeros, active, strongest), / 0\.00(?!\d)/);
  }
});

test("a listed key that is not visible is ignored", () => {
  const side = randomSide(3, randomNumbers(1));
  const plain = unitsOf({...side, wordOf: [0, 1, 2], words: ["a", "b", "c"]}, false);
  const visibility = parseVisibility(visibilityBytes([[1, null, null], [0.5, 0.5, null], [0.5, null, 0.5]]), 3);
  const {buffer} = sparseBytes([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5], [0.1, 0.5, 0.4]], 3);
  const matrix = unitMatrix(parseSparse(buffer, 3, 3), visibility, plain, plain);
  assert.deepEqual([...rowOf(matrix, 0).indices], [0]);
  assert.deepEqual([...rowOf(matrix, 1).indices], [0, 1]);
  assert.deepEqual([...rowOf(matrix, 2).indices], [0, 2]);
});

const FORMATS = {percent: formatPercent, atLeast: formatPercentAtLeast};
const nameOf = number => `3.${number}`;

function score(number, share, uniform, upper = share) {
  return {head: number, focus: {share, upper, uniform, rows: 3, exact: upper === share}};
}

test("a head has a focus if its share is at least a half and above uniform attention", () => {
  assert.equal(hasFocus(score(0, 0.5, 0.4).focus), "yes");
  assert.equal(hasFocus(score(0, 0.49, 0.1).focus), "no");
  assert.equal(hasFocus(score(0, 0.6, 0.7).focus), "no");
  assert.equal(hasFocus(score(0, 0.6, 0.6).focus), "no");
  assert.equal(hasFocus(score(0, 0.3, 0.1, 0.6).focus), "unknown");
  assert.equal(hasFocus(score(0, 0.3, 0.1, 0.4).focus), "no");
  assert.equal(hasFocus(score(0, 0.3, 0.7, 0.6).focus), "no");
  assert.equal(hasFocus(score(0, 0.5, 0.1, 0.9).focus), "yes");
});

test("the verdict names the heads that have the focus", () => {
  const verdict = (scores, kind = "received") => focusVerdict(rankedScores(scores), kind, nameOf, FORMATS);
  assert.deepEqual(
    rankedScores([score(4, 0.31, 0.12), score(5, 0.3, 0.01), {head: 6, focus: null}]).map(each => each.head),
    [5, 4],
  );
  assert.equal(verdict([]), "No head has a row of attention that counts for these words.");
  assert.equal(
    verdict([score(4, 0.31, 0.12), score(5, 0.3, 0.01), score(6, 0.8, 0.9)]),
    "No head puts at least half of its attention on these words and more than under uniform attention. " +
      "Head 3.5 comes closest: 30 % (uniform attention: 1 %).",
  );
  assert.equal(
    verdict([score(6, 0.37, 0.25)]),
    "No head puts at least half of its attention on these words. Head 3.6 comes closest: 37 % (uniform attention: 25 %).",
  );
  assert.equal(
    verdict([score(6, 0.37, 0.25)], "exchanged"),
    "In no head do these words put at least half of their attention on each other. " +
      "Head 3.6 comes closest: 37 % (uniform attention: 25 %).",
  );
  assert.equal(
    verdict([score(1, 0.6, 0.1), score(2, 0.4, 0.1)]),
    "Head 3.1 has this focus: at least half of its attention is on these words, more than under uniform attention.",
  );
  assert.equal(
    verdict([score(1, 0.6, 0.1), score(2, 0.7, 0.1)], "exchanged"),
    "Heads 3.2, 3.1 have this focus: at least half of their attention is among these words, more than under uniform attention.",
  );
  const many = Array.from({length: 20}, (_, number) => score(number, 0.9 - number / 100, 0.1));
  assert.match(verdict(many), /^Heads 3\.0, 3\.1, 3\.2, 3\.3, 3\.4, 3\.5, 3\.6, 3\.7 and 12 others have this focus: /);
  assert.match(verdict(many.slice(0, 9)), /3\.7 and 1 other have this focus: /);
});

test("the verdict of bounds states bounds", () => {
  const verdict = (scores, kind = "received") => focusVerdict(rankedScores(scores), kind, nameOf, FORMATS);
  assert.equal(
    verdict([score(1, 0.6, 0.1, 0.9), score(2, 0.7, 0.1, 0.8), score(3, 0.2, 0.1, 0.8)]),
    "At least 2 heads have this focus: at least half of their attention is on these words, more than under uniform attention.",
  );
  assert.match(verdict([score(1, 0.6, 0.1, 0.9)]), /^At least one head has this focus: at least half of its attention/);
  assert.equal(
    verdict([score(1, 0.2, 0.1, 0.9), score(2, 0.3, 0.1, 0.4)]),
    "No head is known to put at least half of its attention on these words, because the page stores only the largest " +
      "weights of this text. Head 3.2 comes closest: at least 30 % (uniform attention: 10 %).",
  );
  assert.match(verdict([score(1, 0, 0.1, 0.9)]), /Head 3\.1 comes closest: an unknown share \(uniform/);
  assert.match(verdict([score(1, 0.2, 0.1, 0.3)]), /^No head puts at least .* comes closest: at least 20 % \(/);
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
  const grid = matrixGrid(found.matrix, all, all, {rows: 1, columns: 1, weights: Float32Array.of(1)});
  const key = all.find(unit => weightAt(found.matrix, 2, unit) === null && isVisible(found.matrix, 2, unit));
  assert.match(cellText(grid, 2, key), /: not stored, at most 0\.\d{3}\. The mean weight of the tile around it is 0\.0\d\.$/);
  assert.equal(tilesNote(matrixGrid(head({storage: "dense", causal: false, merged: false, seed: 3}).matrix, all, all, grid.tiles)), "");
  assert.match(tilesNote(grid), /Every other cell has the mean weight of the tile around it, a square of about 22 by 22 words\.$/);
});

test("the difference of two matrices is B minus A in every cell", () => {
  for (const storage of ["dense", "sparse"]) {
    const [a, b] = [5, 5].map((seed, place) => {
      const found = head({storage, causal: true, merged: true, seed});
      return place ? {...found.matrix, weight: found.matrix.weight.map((weight, entry) => (entry % 3 ? weight : 0))} : found.matrix;
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
    const strongest = strongestWords(activeWeights(matrix, {axis: "query", unit: 3}, {rows: matrix.visible, hiddenKeys: new Uint8Array(units.count)}));
    assert.ok(strongest.length && strongest.every(({weight}) => weight < 0));
    const all = [...units.labels.keys()];
    const query = [...a.visible.keys()].findLast(unit => a.visible[unit]);
    const text = cellText(matrixGrid(matrix, all, all, null), query, rowOf(a, query).indices[0], "B − A");
    assert.match(text, storage === "dense" ? /^B − A, .*: (\+|−|≈)?[\d.]+ \(A \S+, B \S+\)$/ : /^B − A, .*: not exactly known \(A /);
  }
});

test("numbers are rounded so that they stay bounds, and small weights are not shown as 0.00", () => {
  assert.deepEqual([0, 0.0049, 0.005, 0.33, 1e-9].map(formatWeight), ["0.00", "<0.01", "0.01", "0.33", "<0.01"]);
  assert.deepEqual(
    [0, 1e-5, 0.0049, 0.0199, Math.fround(0.33), 0.999, 1, -0.484].map(formatAtLeast),
    ["0.00", ">0", "0.004", "0.01", "0.33", "0.99", "1.00", "−0.49"],
  );
  assert.deepEqual([-0.01, 0, 1e-5, 0.33001].map(formatBound), ["unknown", "≥ 0", "≥ 0", "at least 0.33"]);
  assert.deepEqual([0, 0.12, -0.128, 0.001, -0.001].map(formatSigned), ["0.00", "+0.12", "−0.13", "+0.001", "−0.001"]);
  assert.deepEqual([-1e-9, -0.0003, -0.01].map(formatNumber), ["0.00", "−0.0003", "−0.01"]);
  assert.deepEqual(
    [0, -0.0003, -0.003, 0.25, -1234, 12_345, -2_345_678, NaN].map(formatShort),
    ["0.00", "≈0", "−0.003", "0.25", "−1,234", "12K", "−2.3M", "–"],
  );
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
