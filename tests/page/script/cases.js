/** Random heads with brute-force results, for tests of each case. */
import assert from "node:assert/strict";
import {test} from "node:test";
import {unitMatrix} from "../../../src/headwise/page/script/attention.js";
import {parseDense, parseSparse, parseVisibility} from "../../../src/headwise/page/script/decode.js";
import {unitsOf} from "../../../src/headwise/page/script/words.js";
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

/** Return a random head: its matrix, units, weights, visible keys and expected weights. */
export function head({storage, causal, merged, seed}) {
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

/** Fail if two numbers differ by more than a rounding error. */
export function assertClose(actual, expected, message) {
  assert.ok(Math.abs(actual - expected) < 1e-6, `${message}: ${actual} instead of ${expected}`);
}

/** Run a check on a random head of each case. */
export function everyCase(name, check) {
  for (const parameters of CASES)
    test(`${name}: ${JSON.stringify(parameters)}`, () => check(head(parameters), parameters));
}

/** Return attention between words without rounding, and between tokens without words of several tokens. */
export function exactWeights({weights, side, seen}) {
  return wordWeights(weights, side, side, seen);
}
