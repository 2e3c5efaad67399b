/** Search for heads that attend to marked words. */
import {
  byId,
  choiceButtons,
  element,
  formatBound,
  formatPercent,
  formatPercentAtLeast,
  formatSigned,
  formatWeight,
  pressChoice,
} from "./dom.js";
import {focusVerdict, hasFocus, otherWordNote} from "./focus.js";
import {marksOfSide} from "./marks.js";
import {pinnedUnit} from "./meanattention.js";
import {rankHeads} from "./rank.js";
import {quotedName, unitName} from "./words.js";

/** Number of heads that are listed. */
const LISTED_HEADS = 10;

/** Number of patches of a picture up to which each is named. */
const LISTED_PATCHES = 6;

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
      ["pinned", "pinned"],
    ],
    state.get("focus"),
    focus => state.set({focus}),
  );
  byId("find-tools").append(
    kinds,
    element("button", {type: "button", class: "quiet", click: () => state.set({marks: ""})}, "Remove all marks"),
  );
  let started = null;
  let searched = "";

  async function search() {
    const passage = app.passage();
    const model = app.model();
    const stored = page.passages[passage]?.heads[model];
    const {keys: side, queries: querySide} = stored?.[app.head()] ?? {keys: 0, queries: 0};
    const pinned = stored ? pinnedWord(passage, querySide) : null;
    const kind = state.get("focus") === "pinned" && pinned === null ? "received" : state.get("focus");
    const settings = ["marking", "marks", "model"].map(name => state.get(name));
    // Another head with the same keys has the same ranking, which keeps its place and the keyboard focus.
    const key = [passage, side, querySide, kind, kind === "pinned" ? pinned : "", pinned === null, ...settings].join(" ");
    if (key === searched) return;
    searched = key;
    const job = (started = {});
    root.hidden = !stored || !state.get("marking");
    pressChoice(kinds, kind);
    kinds.lastElementChild.hidden = pinned === null;
    if (root.hidden) return;
    const {sides} = page.passages[passage];
    const units = page.units(passage, side, true);
    const marked = new Set(marksOfSide(state.get("marks"), side).filter(word => word < units.count));
    const place = sides.length > 1 ? ` in “${sides[side].name}”` : "";
    byId("find-words").textContent = marked.size
      ? `Marked${place}: ${markedNames(units, [...marked].sort((a, b) => a - b)).join(", ")}`
      : `${page.say("No word")}${place} is marked.`;
    byId("find-kind").textContent = [
      kind === "pinned"
        ? page.say(`The attention that ${quotedName(page.units(passage, querySide, true), pinned)} puts on the marked words.`)
        : kind === "received"
          ? page.say("Received: the mean attention that all other words put on the marked words.")
          : page.say("Exchanged: the mean attention that each marked word puts on the other marked words."),
      page.models.length === 2 ? `The search uses model ${"AB"[model]}, ${page.models[model].name}.` : "",
      stored.some(head => head?.storage === "sparse")
        ? page.say("The page stores only the largest weights of this text, so heads are ranked by lower bounds.")
        : "",
    ]
      .filter(Boolean)
      .join(" ");
    result.replaceChildren();
    status.textContent =
      kind === "exchanged" && marked.size === 1 ? page.say("Mark at least two words that exchange attention.") : "";
    if (!marked.size || status.textContent) return;
    const chosen = kind === "pinned" ? new Set([pinned]) : null;
    const measured = chosen ? "received" : kind;
    const ranked = await rankHeads(page, {passage, model, side, marked, kind: measured, chosen, querySide}, done => {
      if (job === started) status.textContent = `${done} of ${page.heads.length} heads are done.`;
      return job === started;
    });
    if (!ranked) return;
    const nameOf = head => page.heads[head].name;
    const formats = {percent: formatPercent, atLeast: formatPercentAtLeast};
    const verdict = focusVerdict(ranked, measured, nameOf, formats);
    const [best] = ranked;
    const note = best ? otherWordNote(best.focus, units, nameOf(best.head), formats) : "";
    status.textContent = `${page.say(verdict)} ${note}`.trim();
    if (ranked.length) result.replaceChildren(rankingTable(app, ranked));
  }

  /** Return the pinned query word, also when tokens are shown, or null. */
  function pinnedWord(passage, querySide) {
    const units = page.units(passage, querySide, state.get("words"));
    const pin = pinnedUnit(state.get("pin"), units, units);
    if (pin?.axis !== "query") return null;
    return state.get("words") ? pin.unit : page.passages[passage].sides[querySide].wordOf[pin.unit];
  }

  state.on(["marking", "marks", "focus", "passage", "model", "head", "pin", "words"], search);
  search();
}

/** Return the names of marked units. Many patches of a picture are named together. */
function markedNames(units, marked) {
  const ofPicture = (unit, picture) => units.patches[unit]?.[0] === picture;
  const groups = units.pictures.map((_, picture) => marked.filter(unit => ofPicture(unit, picture)));
  const isMany = unit => groups[units.patches[unit]?.[0]]?.length > LISTED_PATCHES;
  return [
    ...marked.filter(unit => !isMany(unit)).map(unit => unitName(units, unit, 20)),
    ...groups.flatMap((group, picture) =>
      group.length > LISTED_PATCHES ? [`${group.length} patches of ${units.pictures[picture].name}`] : [],
    ),
  ];
}

function rankingTable(app, ranked) {
  const isExact = ranked.every(score => score.focus.exact);
  const columns = ["head", "share", "uniform attention", "above uniform", "has the focus"];
  return element(
    "table",
    {class: "statistics"},
    element(
      "caption",
      {},
      `Heads by ${isExact ? "" : "lower bounds of the "}share above uniform attention` +
        (ranked.length > LISTED_HEADS ? `, the first ${LISTED_HEADS} of ${ranked.length}` : ""),
    ),
    element("thead", {}, element("tr", {}, ...columns.map(name => element("th", {scope: "col"}, name)))),
    element(
      "tbody",
      {},
      ...ranked
        .slice(0, LISTED_HEADS)
        .map(({head, focus}) =>
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
              isExact ? formatWeight(focus.share) : formatBound(focus.share),
              formatWeight(focus.uniform),
              isExact ? formatSigned(focus.share - focus.uniform) : formatBound(focus.share - focus.uniform),
              hasFocus(focus),
            ].map(text => element("td", {}, text)),
          ),
        ),
    ),
  );
}
