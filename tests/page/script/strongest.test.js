import assert from "node:assert/strict";
import {test} from "node:test";
import {shownRows, unitMatrix, weightAt} from "../../../src/headwise/page/script/attention.js";
import {parseDense, parseVisibility} from "../../../src/headwise/page/script/decode.js";
import {linksText} from "../../../src/headwise/page/script/export.js";
import {strongestLinks} from "../../../src/headwise/page/script/strongest.js";
import {hiddenUnits, unitsOf} from "../../../src/headwise/page/script/words.js";
import {assertClose, everyCase} from "./cases.js";
import {denseBytes, randomSide, visibilityBytes} from "./oracle.js";

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
      assert.equal(
        back !== null,
        links.some(link => link.query === query && link.back !== null),
      );
      if (back !== null) assertClose(back, best[key].weight, "weight back");
    }
    let shown = 0;
    expected.forEach((row, query) => {
      if (rows[query])
        shown += matrix.rest[query] + row.reduce((sum, weight, key) => sum + (hidden[key] ? 0 : (weight ?? 0)), 0);
    });
    const covered = result.links.reduce((sum, link) => sum + link.weight + (link.back ?? 0), 0);
    assert.ok(Math.abs(result.covered - covered / shown) < 1e-5);
    if (!skipsFirst) assert.equal(result.onFirst, null);
    else
      assertClose(
        result.onFirst,
        expected.reduce((sum, row, query) => sum + (rows[query] ? (row[0] ?? 0) : 0), 0) / shown,
        "on the first",
      );
  }
});

test("two words that attend most to each other share a link, and weights below 0.005 are no links", () => {
  const rows = [
    [0, 0.6, 0.4, 0],
    [0.5, 0.1, 0.4, 0],
    [0.004, 0.003, 0.9, 0.003],
    [0.1, 0.2, 0.3, 0.4],
  ];
  const side = {
    ...randomSide(4, () => 0.5),
    words: ["a", "b", "c", "d"],
    tokens: ["a", "b", "c", "d"],
    special: [0, 0, 0, 0],
  };
  const units = unitsOf(side, false);
  const visibility = parseVisibility(visibilityBytes(rows), 4);
  const matrix = unitMatrix(parseDense(denseBytes(rows).buffer, 4, 4), visibility, units, units);
  const none = new Uint8Array(4);
  const {links} = strongestLinks(matrix, matrix.visible, none, 8);
  const rounded = weight => (weight === null ? null : Number(weight.toFixed(2)));
  assert.deepEqual(
    links.map(({query, key, weight, back}) => [query, key, rounded(weight), rounded(back)]),
    [
      [0, 1, 0.6, 0.5],
      [3, 2, 0.3, null],
    ],
  );
  const copied = linksText({matrix, shown: {rows: matrix.visible, hiddenKeys: none}})
    .split("\n")
    .slice(1);
  assert.deepEqual(
    copied.map(line => line.split("\t").slice(0, 2).join("")),
    ["ab", "ba", "dc"],
  );
});
