import assert from "node:assert/strict";
import {test} from "node:test";
import {gzipSync} from "node:zlib";
import {
  angularTable,
  bytesOfBase64,
  gunzip,
  parseDense,
  parseSparse,
  parseVisibility,
  visibleKeys,
} from "../../../src/headwise/page/script/decode.js";
import {denseBytes, randomNumbers, randomWeights, sparseBytes, visibilityBytes} from "./oracle.js";

test("base64 of gzip is decompressed", async () => {
  const bytes = Uint8Array.from({length: 1000}, (_, place) => (place * 37) % 256);
  const decoded = new Uint8Array(await gunzip(bytesOfBase64(`\n${gzipSync(bytes).toString("base64")}\n`)));
  assert.deepEqual(decoded, bytes);
});

test("angular codes are exact at 0 and 1, and elsewhere within pi / 4 / levels", () => {
  for (const levels of [255, 65535]) {
    const table = angularTable(levels);
    assert.equal(table[0], 0);
    assert.equal(table[levels], 1);
    for (let code = 0; code < levels; code++) assert.ok(table[code + 1] - table[code] <= Math.PI / 2 / levels + 1e-7);
  }
});

test("dense rows and runs of visible keys are read", () => {
  const weights = randomWeights(7, 11, randomNumbers(3), true);
  const {buffer} = denseBytes(weights);
  const dense = parseDense(buffer, 7, 11);
  const visibility = parseVisibility(visibilityBytes(weights), 7);
  weights.forEach((row, query) => {
    row.forEach((weight, key) =>
      assert.ok(Math.abs(angularTable(65535)[dense.codes[query * 11 + key]] - (weight ?? 0)) < 2e-5),
    );
    assert.equal(visibleKeys(visibility, query), row.filter(weight => weight !== null).length);
    assert.equal(visibleKeys(visibility, query, 2, 5), row.slice(2, 5).filter(weight => weight !== null).length);
  });
});

test("sparse rows are read from an odd offset", () => {
  const weights = randomWeights(5, 13, randomNumbers(4), false);
  const {buffer, stored, totals} = sparseBytes(weights, 3);
  const sparse = parseSparse(buffer, 5, 13);
  const table = angularTable(255);
  stored.forEach((row, query) => {
    const keys = [...row.keys()].filter(key => row[key] !== null);
    assert.deepEqual([...sparse.key.subarray(sparse.start[query], sparse.start[query + 1])], keys);
    keys.forEach((key, place) =>
      assert.ok(Math.abs(table[sparse.codes[sparse.start[query] + place]] - row[key]) < 1e-6),
    );
    assert.ok(Math.abs(sparse.totals[query] - totals[query]) < 1e-4);
  });
});

test("incomplete data are refused", () => {
  assert.throws(() => parseDense(new ArrayBuffer(10), 7, 11), /incomplete/);
});
