import assert from "node:assert/strict";
import {readFileSync, readdirSync} from "node:fs";
import {test} from "node:test";

const FOLDER = new URL("../../../src/headwise/page/script/", import.meta.url);
const FILES = readdirSync(FOLDER).filter(name => name.endsWith(".js"));
const SOURCES = new Map(FILES.map(name => [name, readFileSync(new URL(name, FOLDER), "utf8")]));

test("names at the top of the modules are unique, because the modules are joined into one", () => {
  const owners = new Map();
  for (const [file, source] of SOURCES) {
    for (const [, name] of source.matchAll(/^(?:export )?(?:async )?(?:function|const|let|class) (\w+)/gm)) {
      assert.ok(!owners.has(name), `${name} is in ${owners.get(name)} and in ${file}`);
      owners.set(name, file);
    }
  }
});

test("every module is short, builds no HTML from text, and has imports that the writer of the page reads", () => {
  for (const [file, source] of SOURCES) {
    assert.ok(source.split("\n").length <= 250, `${file} is too long`);
    assert.doesNotMatch(source, /export default|innerHTML|insertAdjacentHTML|document\.write|\beval\(/, file);
    const statements = source.match(/^import\b/gm) ?? [];
    const readable = source.match(/^import \{[^}]*\} from "\.\/[\w-]+\.js";\n/gm) ?? [];
    assert.equal(readable.length, statements.length, `${file} has an import that the writer of the page does not read`);
  }
});
