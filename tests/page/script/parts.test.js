import assert from "node:assert/strict";
import {test} from "node:test";
import {shownRows} from "../../../src/headwise/page/script/attention.js";
import {headKinds, differentKinds, kindTitle, shortKind} from "../../../src/headwise/page/script/kinds.js";
import {lineUnits} from "../../../src/headwise/page/script/lines.js";
import {agreementText, areaUnder, unitRelevance} from "../../../src/headwise/page/script/relevance.js";
import {attentionShares} from "../../../src/headwise/page/script/shares.js";
import {createState} from "../../../src/headwise/page/script/state.js";
import {scalesOf, strengthOfLargest} from "../../../src/headwise/page/script/tint.js";
import {assertClose, everyCase} from "./cases.js";

everyCase("shares of attention are sums over disjoint parts", ({matrix, units, expected}) => {
  const patches = units.labels.map((_, unit) => (unit > 2 && unit < 8 ? [unit % 2, 0, 0, 1, 1] : null));
  const keyUnits = {...units, patches, pictures: [{name: "one"}, {name: "two"}], special: units.special.slice()};
  keyUnits.special[2] = 1;
  const rows = shownRows(matrix, units.special, true);
  const counted = [...rows.keys()].filter(query => rows[query]);
  const shares = new Map(attentionShares({...matrix, keyUnits}, rows).map(({name, share}) => [name, share]));
  const mean = isPart =>
    counted.reduce((sum, query) => sum + expected[query].reduce((part, weight, key) => part + (isPart(key) ? weight ?? 0 : 0), 0), 0) /
    counted.length;
  const isSpecial = key => key > 0 && keyUnits.special[key];
  const isWord = key => key > 0 && !keyUnits.special[key] && !patches[key];
  const parts = {
    [`first token, ${units.labels[0]}`]: key => key === 0,
    "special tokens": isSpecial,
    one: key => !isSpecial(key) && patches[key]?.[0] === 0,
    two: key => !isSpecial(key) && patches[key]?.[0] === 1,
    "generated words": key => isWord(key) && units.generated[key],
    "words of the prompt": key => isWord(key) && !units.generated[key],
  };
  for (const [name, isPart] of Object.entries(parts)) assertClose(shares.get(name) ?? 0, mean(isPart), name);
  const total = [...shares.values()].reduce((sum, share) => sum + share, 0);
  assert.ok(Math.abs(total - 1) < 1e-3, `${total}`);
  assert.equal(shares.has("not stored"), !matrix.exact && total - mean(() => true) > 0);
});

test("words and patches of one text have two scales, and other texts one", () => {
  const patch = [0, 0, 0, 1, 1];
  const weights = {indices: [0, 1, 2], weights: [0.4, -0.1, 0.02]};
  const scales = noun => scalesOf([{units: {noun, patches: [null, patch, patch]}, ...weights}], 0.01);
  const mixed = scales("word or patch");
  assert.deepEqual([mixed.word.largest, mixed.patch.largest], [0.4, 0.1]);
  assert.equal(mixed.patch.strength, strengthOfLargest(0.1, 0.01));
  const one = scales("patch");
  assert.deepEqual([one.word.largest, one.patch.largest], [0.4, 0.4]);
});

test("curves of a few rows go to the words to which they attend", () => {
  const count = 100;
  const unitsOfTexts = {count, labels: Array.from({length: count}, (_, unit) => `w${unit}`)};
  const start = Int32Array.from({length: count + 1}, (_, query) => 3 * query);
  const key = Int32Array.from({length: 3 * count}, (_, entry) => (entry % 3) * 30 + Math.floor(entry / 3 / 50));
  const weight = Float32Array.from({length: 3 * count}, (_, entry) => [0.9, 0.06, 0.03][entry % 3]);
  const matrix = {queryUnits: unitsOfTexts, keyUnits: unitsOfTexts, start, key, weight};
  const none = new Uint8Array(count);
  const rows = none.map((_, query) => Number(query > 97));
  const shown = lineUnits(matrix, {rows, hiddenQueries: none, hiddenKeys: none}, null, 0);
  assert.deepEqual(shown, {queries: [98, 99], keys: [1, 31], isFew: true});
});

test("heads of several sides are named by their sides", () => {
  const sides = ["vision", "queries", "text"].map(name => ({name}));
  const pairs = [[0, 0], [1, 1], [1, 0], [2, 2], [2, 1]];
  const heads = pairs.map(() => ({kind: "self", module: "layers.0"}));
  const stored = pairs.map(([queries, keys]) => ({queries, keys}));
  const kinds = headKinds({models: [{heads}], passages: [{sides, heads: [stored]}]});
  assert.deepEqual(kinds, ["vision self", "queries self", "queries to vision cross", "text self", "text to queries cross"]);
  assert.deepEqual(differentKinds(kinds), [kinds[0], kinds[1], kinds[3], kinds[2], kinds[4]]);
  assert.deepEqual(kinds.map(shortKind), ["vision", "queries", "queries to vision", "text", "text to queries"]);
  assert.equal(kindTitle(kinds[2]), "queries to vision cross-attention");
  const towers = {sides: sides.slice(0, 2), heads: [stored.slice(0, 2)]};
  assert.deepEqual(headKinds({models: [{heads: heads.slice(0, 2)}], passages: [towers]}), ["vision self", "queries self"]);
});

test("the relevance of a word is the sum over its tokens with a value", () => {
  const units = {count: 3, first: Int32Array.of(0, 2, 3, 5)};
  const found = unitRelevance(units, Float32Array.of(0.5, -0.25, NaN, NaN, 2));
  assert.deepEqual([...found], [0.25, NaN, 2]);
});

test("areas under curves are those of trapezoids", () => {
  assert.equal(areaUnder(Float32Array.of(1, 0)), 0.5);
  assert.equal(areaUnder(Float32Array.of(1, 0, 0)), 0.25);
  assert.equal(areaUnder(Float32Array.of(0.5, 0.5, 0.5, 0.5)), 0.5);
});

test("a map that does not agree with occlusion says so", () => {
  assert.deepEqual(agreementText(null), {text: "", warning: ""});
  const [yes, no] = [[0.41, 0.22, 0.58], [0.03, -0.125, 0.19]].map(agreementText);
  assert.deepEqual(yes, {text: "Agreement with occlusion: Spearman 0.41 (0.22 to 0.58)", warning: ""});
  assert.match(no.text, /Spearman 0\.03 \(−0\.1[23] to 0\.19\)$/);
  assert.equal(no.warning, "This map does not agree with occlusion.");
  assert.notEqual(agreementText([0.2, 0, 0.4]).warning, "");
  assert.deepEqual(agreementText([null, null, null]), {text: "Agreement with occlusion: unknown", warning: ""});
});

test("settings in which a page opens have the types of the defaults", () => {
  const state = createState("", () => {}, {generated: "true", sort: "3", opacity: "20", tray: "A1 A2"});
  const values = ["generated", "sort", "opacity", "tray", "words"].map(state.get);
  assert.deepEqual(values, [true, "3", 20, ["A1", "A2"], true]);
});
