/** Overview of the model: all heads, in groups, with a legend and a search. */
import {byId, counted, element, formatAtLeast, formatNumber, formatWeight} from "./dom.js";
import {scaleColour, valueScale} from "./colours.js";
import {drawScale} from "./thumbnail.js";
import {shownValue, statisticWithUnit} from "./data.js";
import {chosenHeads, colourStatistic, isDiverging, isNameSearch} from "./filter.js";
import {cellSize, createCells, roleBadge} from "./cells.js";
import {groupsOf} from "./groups.js";
import {nearestInLine} from "./navigate.js";
import {rankHeads, wordsEqualTo} from "./rank.js";
import {createControls} from "./controls.js";
import {overlayName} from "./overlay.js";

const LAYOUT = [
  "passage",
  "model",
  "group",
  "sort",
  "search",
  "roles",
  "layers",
  "kind",
  "range",
  "from",
  "to",
  "changed",
];

/** Fill the overview of the page. */
export function createOverview(app) {
  const {page, state} = app;
  const groups = byId("overview-groups");
  const status = byId("overview-status");
  const cells = createCells(app);
  const layers = page.heads.map(head => `${head.module} ${head.layer}`);
  const columns = Math.max(...layers.map(layer => layers.filter(other => other === layer).length));
  groups.style.setProperty("--cell", `${cellSize(page.heads.length)}px`);
  groups.style.setProperty("--columns", columns);
  let searching = null;
  createControls(app);

  async function arrange() {
    const search = state.get("search").trim();
    const job = (searching = {});
    let heads = chosenHeads(page, state);
    if (search && !isNameSearch(page, search)) {
      const ranked = await headsByWord(search, () => job === searching);
      if (job !== searching) return;
      const chosen = new Set(heads);
      const shown = ranked.filter(score => chosen.has(score.head));
      heads = shown.map(score => score.head);
      if (heads.length) status.textContent = rankingSummary(search, shown);
      else if (ranked.length) status.textContent = "No head is left by the filters.";
      else status.textContent = `No head has this name, and “${search}” is not a ${page.say("word of this text")}.`;
      fill([{title: `attention on “${search}”`, heads}]);
      return;
    }
    const all = page.heads.length;
    status.textContent = heads.length === all ? counted(all, "head") : `${heads.length} of ${counted(all, "head")}`;
    fill(groupsOf(app, heads));
  }

  function rankingSummary(search, shown) {
    const best = shown[0].focus;
    const model = page.models.length === 2 ? ` in model ${"AB"[app.model()]}` : "";
    const order = `${counted(shown.length, "head")}, sorted by`;
    return best.exact
      ? `${order} the mean attention on “${search}”${model}: the largest is ${formatWeight(best.share)}.`
      : `${order} lower bounds of the mean attention on “${search}”${model}: the largest is at least ` +
          `${formatAtLeast(best.share)}. The page stores only the largest weights of this text.`;
  }

  async function headsByWord(search, isCurrent) {
    if (!page.passages.length) return [];
    const passage = app.passage();
    const found = [];
    for (const side of page.passages[passage].sides.keys()) {
      const marked = wordsEqualTo(page.units(passage, side, true), search);
      if (!marked.size) continue;
      const ranked = await rankHeads(page, {passage, model: app.model(), side, marked, kind: "received"}, done => {
        if (isCurrent()) status.textContent = `Searching: ${done} of ${counted(page.heads.length, "head")} are done.`;
        return isCurrent();
      });
      found.push(...(ranked ?? []));
    }
    return found.sort((a, b) => b.focus.share - a.focus.share);
  }

  function fill(list) {
    const by = state.get("group") === "role" && !page.roles.length ? "layer" : state.get("group");
    groups.className = `groups by-${by}${page.allKinds.length > 1 ? " with-kinds" : ""}`;
    groups.replaceChildren(
      ...list.map(group =>
        element(
          "div",
          {class: "group"},
          element(
            "h3",
            {class: "group-title"},
            group.role ? roleBadge(group.role) : null,
            group.title,
            group.role ? element("span", {class: "soft"}, ` ${group.heads.length}`) : null,
          ),
          group.rule ? element("p", {class: "rule"}, group.rule) : null,
          element("div", {class: "cells"}, ...group.heads.map(head => cells.buttons[head])),
        ),
      ),
    );
    mark();
  }

  function mark() {
    const chosen = app.head();
    let stop = null;
    cells.buttons.forEach((button, index) => {
      button.setAttribute("aria-pressed", String(index === chosen));
      button.tabIndex = -1;
      if (button.isConnected && (!stop || index === chosen)) stop = button;
    });
    if (stop) stop.tabIndex = 0;
  }

  groups.addEventListener("click", event => {
    const cell = event.target.closest(".cell");
    if (cell) app.choose(Number(cell.dataset.head));
  });
  groups.addEventListener("keydown", event => moveFocus(event, groups));
  state.on(LAYOUT, arrange);
  state.on(["head"], mark);
  const repaint = () => {
    cells.repaint();
    showLegend(app);
  };
  state.on(["model", "passage", "colour"], repaint);
  state.on(["pin", "words", "special", "first", "generated", "opacity"], () => {
    if (overlayName(app) !== null) repaint();
  });
  app.onTheme(repaint);
  arrange();
  repaint();
}

/** Move the keyboard focus between cells with the arrow keys. */
function moveFocus(event, groups) {
  const cells = [...groups.querySelectorAll(".cell")];
  const at = cells.indexOf(document.activeElement);
  if (at < 0) return;
  let next = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: cells.length - 1}[event.key];
  if (event.key === "ArrowDown" || event.key === "ArrowUp")
    next = cells.indexOf(nearestInLine(cells, at, event.key === "ArrowDown"));
  if (next === undefined) return;
  event.preventDefault();
  if (!cells[next]) return;
  cells[at].tabIndex = -1;
  cells[next].tabIndex = 0;
  cells[next].focus();
}

function showLegend(app) {
  const {page, state} = app;
  const legend = byId("overview-legend");
  const statistic = colourStatistic(page, state);
  const overlay = overlayName(app);
  if (overlay !== null) {
    legend.textContent =
      `Each cell shows the attention of one head on “${overlay}”, and its share: that of the pinned word, or else the mean ` +
      `from all ${state.get("generated") ? "generated words" : "words"} that are shown. ` +
      "Patches with little attention are veiled; each cell has a scale of its own.";
    return;
  }
  if (statistic === null) {
    if (state.get("model") === "difference") {
      legend.replaceChildren(
        "Each picture shows the weights of B minus those of A: rows are queries, columns are keys.",
      );
      return;
    }
    legend.replaceChildren(
      page.passages.length
        ? "Each picture shows the attention of one head: rows are queries, columns are keys. " +
            "The darkness is the square root of the weight; each picture has a scale of its own."
        : "The darkness is the statistic that decides the role.",
    );
    if (document.documentElement.dataset.theme === "dark")
      legend.textContent = legend.textContent.replace("darkness", "brightness");
    return;
  }
  const view = state.get("model");
  const signed = isDiverging(page, state, statistic);
  const scale = valueScale(
    page.heads.map((_, head) => shownValue(page, view, statistic, head)),
    signed,
  );
  const canvas = element("canvas", {"aria-hidden": "true", class: "scale"});
  drawScale(canvas, part => scaleColour(scale.stops, part));
  const {meaning} = page.statistics[statistic];
  const difference = view === "difference" ? "B − A of " : "";
  legend.replaceChildren(
    element(
      "span",
      {class: "legend-scale"},
      element("span", {}, `${difference}${statisticWithUnit(page, statistic)}`),
      element("span", {}, formatNumber(scale.low)),
      canvas,
      element("span", {}, formatNumber(scale.high)),
    ),
    meaning ? ` ${meaning}` : "",
  );
}
