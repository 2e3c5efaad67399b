/** Pictures of a head on a passage: curves between words, and the matrix. */
import {element} from "./dom.js";
import {cssColour, roleColour} from "./colours.js";
import {MOST_LINE_WORDS, highlightLines, linesPicture, linesTitle} from "./lines.js";
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

  function show({matrix, matrices, shown, tiles, role, head}, active) {
    const largest = matrices.reduce((all, each) => each.weight.reduce((a, b) => Math.max(a, Math.abs(b)), all), 0) || 1;
    const strength = strengthOfLargest(largest, uniformWeight(matrix, [...matrix.visible.keys()]));
    const units = matrixUnits(matrix, shown, state.get("generated"));
    matrixView.show({matrix, tiles, role, largest, strength, ...units});
    lines.hidden = Boolean(matrix.signed);
    const picture = matrix.signed
      ? null
      : linesPicture(matrix, shown, cssColour(roleColour(role)), linesTitle(page.heads[head].name, matrix));
    lines.replaceChildren(
      element("h3", {}, "Curves"),
      picture ?? "",
      element("p", {class: "soft"}, page.say(picture ? CURVES_NOTE : tooManyNote(matrix))),
    );
    if (picture) listen(picture);
    activate(active);
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
    matrixView.setActive(active);
    const picture = curves();
    if (picture) highlightLines(picture, active);
  }

  function curves() {
    return lines.hidden ? null : lines.querySelector("svg");
  }

  return {root, content, matrixView, show, activate, curves};
}

const CURVES_NOTE = "Weights below 0.04 are left out, except the largest of each word.";

function tooManyNote({queryUnits, keyUnits}) {
  const count = Math.max(queryUnits.count, keyUnits.count).toLocaleString("en-US");
  return `Curves are drawn for at most ${MOST_LINE_WORDS} words; here are ${count} words.`;
}
