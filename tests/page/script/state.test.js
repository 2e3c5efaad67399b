import assert from "node:assert/strict";
import {test} from "node:test";
import {DEFAULTS, createState, hashOf, valuesOfHash, windowState} from "../../../src/headwise/page/script/state.js";

const CHANGED = {
  ...DEFAULTS,
  passage: 3,
  model: "difference",
  head: "cross 5.11",
  pin: "q17",
  words: false,
  special: true,
  roles: ["0", "2"],
  tray: ["A3", "BL2"],
  marks: "0:4.9,1:2",
  search: "a & b = c #%",
  layers: "2-5",
  from: "-0.5",
};

test("a hash restores every setting", () => {
  assert.deepEqual(valuesOfHash(`#${hashOf(CHANGED)}`), CHANGED);
  assert.equal(hashOf(DEFAULTS), "");
});

test("unknown names and malformed values are ignored", () => {
  assert.deepEqual(valuesOfHash("#passage=-1&__proto__=5&nonsense=7&words=maybe"), {...DEFAULTS, words: false});
  assert.deepEqual(valuesOfHash("#passage=two"), {...DEFAULTS});
});

test("listeners hear of the settings that they named, and only when these change", () => {
  const written = [];
  const heard = [];
  const state = createState("head=1.2", hash => written.push(hash));
  state.on(["head", "pin"], changed => heard.push(changed));
  state.set({head: "1.2", scale: "linear"});
  assert.deepEqual(heard, []);
  state.set({head: "1.3", theme: "dark"});
  assert.deepEqual(heard, [["head", "theme"]]);
  state.set({tray: []});
  assert.deepEqual(written, ["head=1.2&scale=linear", "head=1.3&theme=dark&scale=linear"]);
});

test("an error of one listener is reported, and the other listeners run", context => {
  const errors = [];
  globalThis.reportError = error => errors.push(error.message);
  context.after(() => delete globalThis.reportError);
  const heard = [];
  const state = createState("", () => {});
  const failing = () => {
    throw new Error("first");
  };
  state.on(["head"], failing);
  state.on(["head"], () => heard.push(state.get("head")));
  state.onRestore(failing);
  state.onRestore(() => heard.push("restored"));
  state.restore("head=1.2");
  assert.deepEqual([heard, errors], [["1.2", "restored"], ["first", "first"]]);
});

test("a window that forbids changes of its address keeps the state in memory", () => {
  const view = {
    location: {hash: "#head=0.1"},
    history: {
      replaceState() {
        throw new Error("SecurityError");
      },
    },
    addEventListener() {},
  };
  const state = windowState(view);
  state.set({head: "0.2"});
  assert.equal(state.get("head"), "0.2");
});
