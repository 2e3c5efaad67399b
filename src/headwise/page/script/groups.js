/** Groups of heads in the overview. */
import {statisticTitle} from "./data.js";
import {counted} from "./dom.js";
import {kindTitle} from "./kinds.js";

/** Return the heads in groups for display, [{title, role, rule, heads}]: by role, kind or layer, or all in one group. */
export function groupsOf(app, heads) {
  const {page, state} = app;
  const by = state.get("group");
  const model = page.models[app.model()];
  const sort = state.get("sort");
  if (by === "none")
    return [{title: page.statistics[sort] ? `by ${statisticTitle(page, Number(sort))}` : counted(heads.length, "head"), heads}];
  if (by === "kind" && page.allKinds.length > 1)
    return page.allKinds
      .map(kind => ({title: kindTitle(kind), heads: heads.filter(head => page.kinds[head] === kind)}))
      .filter(group => group.heads.length);
  if (by === "role" && page.roles.length) {
    const roles = [...page.roles.keys(), null];
    return roles
      .map(index => ({
        title: index === null ? "no role" : page.roles[index].title,
        rule: page.roles[index]?.rule,
        role: page.roles[index],
        heads: heads.filter(head => model.heads[head].role === index),
      }))
      .filter(group => group.heads.length);
  }
  return layersOf(page, heads);
}

/** Return the heads by layer. The layers of one kind of head, or with one prefix of the heads' names, are together. */
function layersOf(page, heads) {
  const layers = new Map();
  for (const head of heads) {
    const {name, layer} = page.heads[head];
    const prefix = name.includes(" ") ? `${name.slice(0, name.lastIndexOf(" "))}, ` : "";
    const kind = page.allKinds.length > 1 ? page.kinds[head] : "";
    const title = kind ? `layer ${layer}, ${kind}` : `${prefix}layer ${layer}`;
    const order = page.allKinds.indexOf(kind);
    if (!layers.has(title)) layers.set(title, {title, layer, order, prefix, heads: []});
    layers.get(title).heads.push(head);
  }
  return [...layers.values()].sort(
    (a, b) => a.order - b.order || a.prefix.localeCompare(b.prefix) || a.layer - b.layer,
  );
}
