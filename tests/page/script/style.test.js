import assert from "node:assert/strict";
import {readFileSync} from "node:fs";
import {test} from "node:test";
import {channels, mixed} from "../../../src/headwise/page/script/colours.js";

const STYLE = readFileSync(new URL("../../../src/headwise/page/style.css", import.meta.url), "utf8");
const THEMES = {light: /^:root \{([^}]*)\}/m, dark: /^:root\[data-theme="dark"\] \{([^}]*)\}/m};

/** Return the custom properties of a theme. */
function propertiesOf(theme) {
  return Object.fromEntries(
    [...THEMES[theme].exec(STYLE)[1].matchAll(/--([\w-]+): (#\w{6}|\d+%)/g)].map(([, name, value]) => [name, value]),
  );
}

function luminance(rgb) {
  const [red, green, blue] = rgb.map(channel =>
    channel / 255 <= 0.04045 ? channel / 255 / 12.92 : ((channel / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** Return the contrast ratio of two colours as in the Web Content Accessibility Guidelines. */
function contrast(one, other) {
  const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}

for (const theme of Object.keys(THEMES)) {
  test(`colours of roles have a contrast of at least 4.5 to the panel, and text is readable on them: ${theme}`, () => {
    const properties = propertiesOf(theme);
    const [panel, ink] = [channels(properties.panel), channels(properties.ink)];
    const names = Object.keys(properties).filter(name => /^(role|series)-|^(lower|higher)$/.test(name));
    assert.equal(names.length, 20);
    for (const name of names) {
      const colour = channels(properties[name]);
      const tint = parseFloat(properties[name === "role-same" ? "tint-same" : "tint"]) / 100;
      assert.ok(contrast(colour, panel) >= 4.5, `${name}: ${contrast(colour, panel)}`);
      const tinted = mixed(panel, colour, tint);
      assert.ok(contrast(ink, tinted) >= 4.5, `text on ${name}: ${contrast(ink, tinted)}`);
    }
  });
}
