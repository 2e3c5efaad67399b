/** Texts of the sides that a head attends from and to: one text if these are the same. */
import {element} from "./dom.js";
import {createText} from "./text.js";

/**
 * Return the texts of a head on a passage, {query, key, isSelf, parts}; `parts` are their elements.
 *
 * @param app the page's context
 * @param passage index of the passage
 * @param stored {queries, keys}: indices of the sides
 * @param events {over(active or null), focused(active), chosen(active, keySideWord), scrolled(unit), marked(units,
 *   others)}
 */
export function createSides({page, state}, passage, {queries, keys}, events) {
  const {sides} = page.passages[passage];
  const isSelf = queries === keys;
  const build = (side, axis, label) =>
    createText({
      units: page.units(passage, side, state.get("words")),
      label: `${label}: press Enter to pin a ${page.say("word")}, and the arrow keys to move`,
      over: unit => events.over(unit === null ? null : {axis: axis(), unit}),
      focused: unit => events.focused({axis: axis(), unit}),
      chosen: unit => events.chosen({axis: axis(), unit}, side === keys),
      scrolled: unit => events.scrolled(unit),
      isMarking: () => state.get("marking") && side === keys,
      marked: (marked, others) => events.marked(marked, others),
    });
  const titled = (text, title) =>
    element("div", {class: "side"}, element("h3", {class: "side-title"}, title), text.root);
  if (isSelf) {
    const text = build(queries, () => (state.get("direction") === "from" ? "query" : "key"), page.say("Words"));
    return {query: text, key: text, isSelf, parts: [text.root]};
  }
  const query = build(queries, () => "query", "Queries");
  const key = build(keys, () => "key", "Keys");
  const parts = [titled(query, `Queries: ${sides[queries].name}`), titled(key, `Keys: ${sides[keys].name}`)];
  return {query, key, isSelf, parts};
}
