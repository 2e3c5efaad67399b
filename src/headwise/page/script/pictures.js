/** Pictures of a head on a passage: curves between words, and the matrix. */
import {element} from "./dom.js";
import {cssColour, roleColour} from "./colours.js";
import {highlightLines, lineUnits, linesPicture, linesTitle} from "./lines.js";
import {pinnedUnit} from "./meanattention.js";
import {strengthOfLargest, uniformWeight} from "./tint.js";
import {createMatrixView, matrixUnits} from "./matrixview.js";

/**
 * Return the pictures of a head, {root, content, matrixView, show(current, active), activate(active), curves()}.
 *
 * @param app the page's context
 * @param name "A", "B" or "B − A" if two models are compared, otherwise ""
 * @param heading function that returns the heading of the model
 * @param events {over(active or null), chosen(active, keySideWord)}
 */
export function createPictures(app, name, heading, events) {
  const {page, state} = app;
  const lines = element("div", {class: "curves"});
  const matrixView = createMatrixView(app, {
    title: "Matrix of the head's attention weights. The list of links has the strongest weights as text.",
    name,
    over: pair => events.over(pair && {axis: "query", unit: pair.query, key: pair.key}),
  });
  const content = element("div", {}, lines, element("div", {}, element("h3", {}, "Matrix"), matrixView.root));
  const root = element("div", {class: "pictures"}, heading(), content);
  let drawn = null;

  function show(next, active) {
    const {matrix, matrices, shown, tiles, role} = next;
    const largest = matrices.reduce((all, each) => each.weight.reduce((a, b) => Math.max(a, Math.abs(b)), all), 0) || 1;
    const strength = strengthOfLargest(largest, uniformWeight(matrix, [...matrix.visible.keys()]));
    const units = matrixUnits(matrix, shown, state.get("generated"));
    matrixView.show({matrix, tiles, role, largest, strength, ...units});
    lines.hidden = Boolean(matrix.signed);
    drawn = null;
    drawLines(next);
    activate(active);
  }

  /** Draw the curves of the words that the settings select, unless they are drawn. */
  function drawLines(next) {
    const {matrix, shown, role, head} = next;
    const pin = pinnedUnit(state.get("pin"), matrix.queryUnits, matrix.keyUnits);
    const units = matrix.signed ? null : lineUnits(matrix, shown, pin, state.get("start"));
    const isSame = ["queries", "keys"].every(axis => String(units?.[axis]) === String(drawn?.units?.[axis]));
    if (drawn?.next === next && isSame) return;
    drawn = {next, units};
    const title = linesTitle(page.heads[head].name, matrix);
    const picture = units && linesPicture(matrix, shown.rows, units, cssColour(roleColour(role)), title);
    lines.replaceChildren(
      element("h3", {}, "Curves"),
      picture ?? "",
      windowTools(units),
      element("p", {class: "soft"}, page.say(linesNote(units))),
    );
    if (picture) listen(picture);
  }

  /** Return buttons that move the window of words, if there is one. */
  function windowTools(units) {
    if (!units?.window) return "";
    const move = (name, start) =>
      element(
        "button",
        {
          type: "button",
          class: name,
          disabled: start === null,
          click: () => {
            state.set({start});
            lines.querySelector(`.${name}`)?.focus();
          },
        },
        page.say(`${name === "earlier" ? "Earlier" : "Later"} words`),
      );
    const {earlier, later} = units.window;
    return element("div", {class: "tools"}, move("earlier", earlier), move("later", later));
  }

  function listen(picture) {
    const wordOf = event => {
      const word = event.target.closest(".line-word");
      if (!word) return null;
      return word.dataset.query
        ? {axis: "query", unit: Number(word.dataset.query)}
        : {axis: "key", unit: Number(word.dataset.key)};
    };
    picture.addEventListener("pointerover", event => events.over(wordOf(event)));
    picture.addEventListener("pointerleave", () => events.over(null));
    picture.addEventListener("click", event => {
      const word = wordOf(event);
      if (word) events.chosen(word, false);
    });
  }

  function activate(active) {
    if (drawn) drawLines(drawn.next);
    matrixView.setActive(active);
    const picture = curves();
    if (picture) highlightLines(picture, active);
  }

  function curves() {
    return lines.hidden ? null : lines.querySelector("svg");
  }

  return {root, content, matrixView, show, activate, curves};
}

/** Return sentences about what the curves leave out. */
function linesNote(units) {
  if (!units) return "All words are hidden.";
  const least = "Weights below 0.04 are left out, except the largest of each word";
  if (units.isPinned) return "The curves are those of the pinned word. Weights below 0.04 are left out, except the largest.";
  if (units.isFew) return `The curves are those of the rows that are shown. ${least}.`;
  if (!units.window) return `${least}.`;
  const [first, last, count] = ["first", "last", "count"].map(name => units.window[name].toLocaleString("en-US"));
  return (
    `These are words ${first} to ${last} of ${count}, and the curves between them. Scroll the text to see others, or pin a ` +
    `word to see its curves to all words. ${least} on these words.`
  );
}
