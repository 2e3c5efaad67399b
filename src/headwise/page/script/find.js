/** Search for heads that attend to marked words. */
import {byId, choiceButtons, element, formatWeight, pressChoice} from "./dom.js";
import {FOCUS_SHARE, focusVerdict} from "./focus.js";
import {rankHeads} from "./rank.js";
import {shortened} from "./words.js";

/** Number of heads that are listed. */
const LISTED_HEADS = 10;

/** Fill the panel that ranks heads by their attention on marked words. */
export function createFind(app) {
  const {page, state} = app;
  const root = byId("find");
  const result = byId("find-result");
  const status = byId("find-status");
  const kinds = choiceButtons(
    "Kind of focus",
    [
      ["received", "received"],
      ["exchanged", "exchanged"],
    ],
    state.get("focus"),
    focus => state.set({focus}),
  );
  byId("find-tools").append(
    kinds,
    element("button", {type: "button", class: "quiet", click: () => state.set({marks: []})}, "Remove all marks"),
  );
  let started = null;

  function side() {
    return page.passages[app.passage()]?.heads[app.model()][app.head()]?.keys ?? 0;
  }

  async function search() {
    const job = (started = {});
    root.hidden = !page.passages.length || !state.get("marking");
    pressChoice(kinds, state.get("focus"));
    if (root.hidden) return;
    const passage = app.passage();
    const kind = state.get("focus");
    const units = page.units(passage, side(), true);
    const marked = new Set(
      state
        .get("marks")
        .map(Number)
        .filter(word => word < units.count),
    );
    byId("find-words").textContent = marked.size
      ? `Marked: ${[...marked]
          .sort((a, b) => a - b)
          .map(word => shortened(units.labels[word], 20))
          .join(", ")}`
      : "No word is marked.";
    byId("find-kind").textContent =
      kind === "received"
        ? "Received: the mean attention that all other words put on the marked words."
        : "Exchanged: the mean attention that each marked word puts on the other marked words.";
    result.replaceChildren();
    status.textContent =
      kind === "exchanged" && marked.size === 1 ? "Mark at least two words that exchange attention." : "";
    if (!marked.size || status.textContent) return;
    const ranked = await rankHeads(page, {passage, model: app.model(), side: side(), marked, kind}, done => {
      if (job === started) status.textContent = `${done} of ${page.heads.length} heads are done.`;
      return job === started;
    });
    if (!ranked) return;
    const nameOf = head => page.heads[head].name;
    status.textContent = focusVerdict(ranked, nameOf, formatWeight);
    if (ranked.length) result.replaceChildren(rankingTable(app, ranked));
  }

  state.on(["marking", "marks", "focus", "passage", "model"], search);
  search();
}

function rankingTable(app, ranked) {
  const bound = ranked[0].focus.exact ? "" : "at least ";
  const columns = ["head", "share", "uniform attention", "above uniform", "has the focus"];
  return element(
    "table",
    {class: "statistics"},
    element(
      "caption",
      {},
      `Heads by share above uniform attention${ranked.length > LISTED_HEADS ? `, the first ${LISTED_HEADS} of ${ranked.length}` : ""}`,
    ),
    element("thead", {}, element("tr", {}, ...columns.map(name => element("th", {scope: "col"}, name)))),
    element(
      "tbody",
      {},
      ...ranked
        .slice(0, LISTED_HEADS)
        .map(({head, focus: {share, uniform}}) =>
          element(
            "tr",
            {},
            element(
              "th",
              {scope: "row"},
              element(
                "button",
                {type: "button", class: "link", click: () => app.choose(head)},
                app.page.heads[head].name,
              ),
            ),
            ...[
              bound + formatWeight(share),
              formatWeight(uniform),
              signed(share - uniform),
              share >= FOCUS_SHARE ? "yes" : "no",
            ].map(text => element("td", {}, text)),
          ),
        ),
    ),
  );
}

function signed(number) {
  return `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(2)}`;
}
