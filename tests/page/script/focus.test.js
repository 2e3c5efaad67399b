import assert from "node:assert/strict";
import {test} from "node:test";
import {formatPercent, formatPercentAtLeast} from "../../../src/headwise/page/script/dom.js";
import {focusOf, focusVerdict, hasFocus, rankedScores} from "../../../src/headwise/page/script/focus.js";
import {assertClose, everyCase, exactWeights} from "./cases.js";

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
  for (const [kind, chosen] of [
    ["received", null],
    ["exchanged", null],
    ["received", new Set([0, 4, 5])],
  ]) {
    const rows = [...expected.keys()].filter(
      query =>
        expected[query].some(weight => weight !== null) &&
        (chosen?.has(query) ?? (!units.special[query] && marked.has(query) === (kind === "exchanged"))),
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
    const focus = focusOf(matrix, marked, kind, true, chosen);
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
      const share =
        rows.reduce((all, query) => all + words.reduce((part, key) => part + sum(query, key), 0), 0) / rows.length;
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
