import assert from "node:assert/strict";
import {test} from "node:test";
import {marksOfSide, marksWith, marksWithout} from "../../../src/headwise/page/script/marks.js";

test("marks belong to a side", () => {
  let marks = "";
  for (const [side, word] of [
    [1, 2],
    [0, 3],
    [0, 4],
    [0, 3],
  ])
    marks = marksWith(marks, side, word);
  assert.equal(marks, "0:3.4,1:2");
  assert.deepEqual(marksOfSide(marks, 0), [3, 4]);
  assert.deepEqual(marksOfSide(marks, 1), [2]);
  assert.deepEqual(marksOfSide(marks, 2), []);
  assert.equal(marksWithout(marks, 0, 3), "0:4,1:2");
  assert.equal(marksWithout(marks, 1, 2), "0:3.4");
  assert.equal(marksWithout("0:3", 0, 3), "");
});

test("malformed marks are ignored", () => {
  for (const text of ["", "3", "3 7", "0:", "0:a", "x:1", "0:1.", ":1"]) assert.deepEqual(marksOfSide(text, 0), []);
  assert.deepEqual(marksOfSide("nonsense,0:5.5.6", 0), [5, 6]);
});
