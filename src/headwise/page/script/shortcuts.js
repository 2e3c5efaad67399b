/** Keyboard shortcuts of the page. */
import {byId, element} from "./dom.js";
import {chosenHeads} from "./filter.js";
import {addToTray} from "./tray.js";

const SHORTCUTS = [
  ["?", "show this list"],
  ["/", "search for a head or a word"],
  ["[ and ]", "choose the head before or after"],
  ["+", "add the chosen head to the comparison"],
  ["m", "turn the marking of words on or off"],
  ["Arrow keys", "move between heads, between words, in a picture, or in the matrix"],
  ["Shift and arrow keys", "on a picture, while marking: mark a rectangle of patches"],
  ["Enter", "choose the head, or pin or mark the word"],
  ["Escape", "unpin the word"],
  ["+, − and 0", "in the matrix: zoom in, zoom out, show everything"],
];

/** Listen to shortcuts and list them in the help dialog. */
export function createShortcuts(app) {
  const {state} = app;
  byId("help-list").append(
    ...SHORTCUTS.flatMap(([key, action]) => [element("dt", {}, element("kbd", {}, key)), element("dd", {}, action)]),
  );
  const step = by => {
    const heads = chosenHeads(app.page, state);
    const at = heads.indexOf(app.head());
    app.choose(heads[(at + by + heads.length) % heads.length] ?? app.head(), false);
  };
  const actions = {
    "?": () => byId("help").showModal(),
    "/": () => document.querySelector('[data-setting="search"]').focus(),
    "[": () => step(-1),
    "]": () => step(1),
    "+": () => addToTray(app),
    m: () => state.set({marking: !state.get("marking")}),
  };
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest("input, select, textarea, dialog[open]") || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
}
