import assert from "node:assert/strict";
import {test} from "node:test";
import {scaleLimits} from "../../../src/headwise/page/script/colours.js";
import {isSigned, rankOf, statisticWithUnit} from "../../../src/headwise/page/script/data.js";
import {
  differentKinds,
  headKinds,
  kindTitle,
  nounsOf,
  shortKind,
} from "../../../src/headwise/page/script/kinds.js";
import {rankText} from "../../../src/headwise/page/script/table.js";
import {strengthOfLargest, tintStrength} from "../../../src/headwise/page/script/tint.js";

/** Return a page with one statistic, which has these values in each model. */
function pageOf(...models) {
  return {
    models,
    heads: models[0].map(() => ({})),
    statistics: [{name: "effect", unit: "nats", source: "ablation"}],
    mean: (model, _, head) => Math.fround(models[model][head]),
  };
}

const ranks = (values, view = "A") => {
  const page = Array.isArray(values[0]) ? pageOf(...values) : pageOf(values);
  return page.heads.map((_, head) => rankText(rankOf(page, view, 0, head)));
};

test("heads with the same value share their ranks, and most heads with the same value have none", () => {
  assert.deepEqual(ranks([0.3, 0.1, 0.2]), ["1st of 3", "3rd of 3", "2nd of 3"]);
  assert.deepEqual(ranks([0, 0, 0.2, 0.1, 0.3]).slice(0, 3), [
    "tied, 4th to 5th of 5",
    "tied, 4th to 5th of 5",
    "2nd of 5",
  ]);
  assert.deepEqual(ranks([0, 0, 0, 0.1]), ["–", "–", "–", "1st of 4"]);
  assert.deepEqual(ranks([0, 0, NaN]), ["–", "–", "–"]);
  assert.deepEqual(ranks([0.5, 0.5 + 1e-8, 0.1, 0.2])[0], "tied, 1st to 2nd of 4");
  assert.deepEqual(
    ranks(
      [
        [0, 0, 0],
        [0.1, 0.3, 0.2],
      ],
      "difference",
    ),
    ["3rd of 3", "1st of 3", "2nd of 3"],
  );
});

test("scales start at 0 if no value is negative, and are symmetric otherwise", () => {
  assert.deepEqual(scaleLimits([0.02, 0.13, NaN], true), {low: 0, high: 0.13});
  assert.deepEqual(scaleLimits([-0.2, 0.1], true), {low: -0.2, high: 0.2});
  assert.deepEqual(scaleLimits([0.02, 0.13], false), {low: 0.02, high: 0.13});
  assert.equal(isSigned(pageOf([0.1, 0.2]), 0), false);
  assert.equal(isSigned(pageOf([0.1, -0.2]), 0), true);
  assert.equal(statisticWithUnit(pageOf([0]), 0), "effect (nats)");
});

test("the kind of a head comes from the sides of the passages, or else from its module", () => {
  const heads = [
    {kind: "self", module: "encoder.layers.0.self_attn"},
    {kind: "self", module: "decoder.layers.0.self_attn"},
    {kind: "cross", module: "decoder.layers.0.encoder_attn"},
  ];
  const kinds = ["encoder self", "decoder self", "cross"];
  assert.deepEqual(headKinds({models: [{heads}], passages: []}), kinds);
  const plain = heads.map(head => ({...head, kind: "self", module: "layers.0"}));
  const stored = [
    {queries: 0, keys: 0},
    {queries: 1, keys: 1},
    {queries: 1, keys: 0},
  ];
  assert.deepEqual(headKinds({models: [{heads: plain}], passages: [{sides: [{}, {}], heads: [stored]}]}), kinds);
  assert.deepEqual(headKinds({models: [{heads: plain}], passages: []}), ["self", "self", "self"]);
  assert.deepEqual(differentKinds(["cross", "encoder self", "cross"]), ["encoder self", "cross"]);
  assert.deepEqual(kinds.map(kindTitle), ["encoder self-attention", "decoder self-attention", "cross-attention"]);
  assert.deepEqual(kinds.map(shortKind), ["enc", "dec", "cross"]);
});

test("pages of pictures have the nouns of patches, and pages of text with pictures those of both", () => {
  const patch = [0, 0, 0, 1, 1];
  const side = (...patches) => ({tokens: patches, special: patches.map((_, at) => Number(at === 0)), pictures: [{}], patches});
  const text = {...side(null, null), pictures: [], patches: []};
  const sentence = "Words of this text, a word, 2 texts, 5 tokens";
  for (const [sides, expected] of [
    [[side(null, patch, patch)], "Patches of this picture, a patch, 2 pictures, 5 patches"],
    [[side(null, patch, null)], "Words and patches of this text, a word or patch, 2 texts, 5 tokens"],
    [[side(null, patch), text], "Words and patches of this text, a word or patch, 2 texts, 5 tokens"],
    [[text, text], sentence],
    [[], sentence],
  ]) {
    const say = nounsOf({passages: sides.length ? [{sides}] : []});
    assert.equal(say(sentence), expected);
    assert.equal(say(say(sentence)), expected);
  }
});

test("the strongest colour is pale for uniform attention, and full for a focus", () => {
  assert.equal(strengthOfLargest(0.08, 1 / 12), 0.25);
  assert.equal(strengthOfLargest(1, 1), 1);
  assert.equal(strengthOfLargest(0.5, 1 / 12), 1);
  assert.equal(strengthOfLargest(0.03, 0.005), 1);
  assert.ok(Math.abs(strengthOfLargest(0.2, 0.1) - 0.5) < 1e-9);
  const strengths = [0.4, 0.1, 0, -0.1].map(weight => tintStrength(weight, {largest: 0.4, strength: 0.5}));
  assert.deepEqual(
    strengths.map(value => Number(value.toFixed(3))),
    [0.5, 0.25, 0, -0.25],
  );
});
