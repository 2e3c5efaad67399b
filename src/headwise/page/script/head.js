/** Panel of the chosen head. */
import {byId, choiceButtons, element, pressChoice} from "./dom.js";
import {roleBadge} from "./cells.js";
import {roleClass} from "./colours.js";
import {roleChanged} from "./filter.js";
import {createHeadView} from "./headview.js";
import {MOST_LINE_WORDS} from "./lines.js";
import {exampleList, statisticsTable} from "./table.js";
import {exportButtons} from "./export.js";
import {ADD_TO_COMPARISON, addToTray, comparisonLink} from "./tray.js";
import {kindTitle} from "./kinds.js";
import {pinnedUnit} from "./meanattention.js";
import {createMarking} from "./marking.js";
import {createRelevance} from "./relevance.js";
import {createSteps} from "./steps.js";

/** Sentences about what the reader can do with the text. */
const HINTS = {
  pointer: {
    start: "Point at a word, or move to it with the arrow keys. Click or press Enter to pin it.",
    pinned: "Escape, or another click on the word, unpins it.",
    marking: "Click words, or press Enter, to mark them. The heads are ranked below the text.",
    region: "Draw a rectangle on a picture, or hold Shift and press the arrow keys, to mark its patches.",
  },
  touch: {
    start: "Tap a word to pin it.",
    pinned: "Tap the word again to unpin it.",
    marking: "Tap words to mark them. The heads are ranked below the text.",
    region: "Draw a rectangle on a picture to mark its patches.",
  },
};

/** Fill the panel of the chosen head. */
export function createHead(app) {
  const {page, state} = app;
  const hasText = page.passages.length > 0;
  const isCompared = page.models.length === 2;
  const marks = createMarking(app);
  const models = [...(isCompared ? [[0, 1]] : []), ...page.models.map((_, model) => [model])];
  const views = hasText ? models.map(each => createHeadView(app, each, {over, focused, chosen, scrolled, marked: marks.mark})) : [];
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const direction = choiceButtons(
    "Direction",
    [
      ["from", page.say("from the word")],
      ["to", page.say("to the word")],
    ],
    state.get("direction"),
    value => {
      const pin = state.get("pin");
      state.set({direction: value, pin: isSelf() && pin ? (value === "from" ? "q" : "k") + pin.slice(1) : pin});
    },
  );
  const marking = element(
    "button",
    {
      type: "button",
      "aria-pressed": "false",
      "aria-controls": "find",
      id: "mark-words",
      click: () => state.set({marking: !state.get("marking")}),
    },
    page.say("Mark words"),
  );
  const hint = byId("head-hint");
  let hovered = null;
  let started = null;
  const compare = element("button", {type: "button", click: () => addToTray(app)}, ADD_TO_COMPARISON);
  const steps = createSteps(app);
  const showMaps = createRelevance(app);
  byId("head-tools").append(direction, marking, compare, comparisonLink(app));
  byId("head-hint").after(steps.root);
  byId("head-views").append(...views.map(view => view.root));
  byId("head-lists").append(...views.map(view => view.lists));
  byId("head-pictures").append(...views.map(view => view.pictures));
  byId("head-tools").hidden = !hasText;
  const saving = hasText ? exportButtons(app, shownView) : null;
  if (saving) byId("head-export").append(saving.root);

  function shownView() {
    return views[isCompared && state.get("model") !== "difference" ? 1 + app.model() : 0];
  }

  function isSelf() {
    const stored = page.passages[app.passage()]?.heads[app.model()][app.head()];
    return !stored || stored.queries === stored.keys;
  }

  /** Return true if the chosen head attended on the passage, in all models that are shown. */
  function isCalled() {
    const {heads} = page.passages[app.passage()];
    const isPair = isCompared && state.get("model") === "difference";
    return (isPair ? heads : [heads[app.model()]]).every(of => of[app.head()]);
  }

  function pinned() {
    const {matrix} = shownView()?.current() ?? {};
    return matrix ? pinnedUnit(state.get("pin"), matrix.queryUnits, matrix.keyUnits) : null;
  }

  function over(active) {
    hovered = active;
    const pin = pinned();
    if (!pin) activate();
    else if (active && "key" in active) hint.textContent = shownView().pair(active.unit, active.key);
    else if (active) {
      const other = active.unit;
      const view = shownView();
      hint.textContent = (pin.axis === "query" ? view.pair(pin.unit, other) : view.pair(other, pin.unit)) || hintText();
    } else hint.textContent = hintText();
  }

  function focused(active) {
    over(active);
    app.announce(shownView().sentence());
  }

  function chosen(active, isKeySide) {
    if (state.get("marking") && isKeySide) {
      marks.mark([active.unit]);
      return;
    }
    const pin = (active.axis === "query" ? "q" : "k") + active.unit;
    state.set({pin: state.get("pin") === pin ? "" : pin});
    app.announce(shownView().sentence());
  }

  /** Move the curves of a long text to the words that are visible. */
  function scrolled(unit) {
    if (page.passages[app.passage()].sides.some(side => side.tokens.length > MOST_LINE_WORDS)) state.set({start: unit});
  }

  function activate() {
    const active = pinned() ?? hovered;
    for (const view of views) view.activate(active);
    saving?.update();
    if (hasText) showMaps(pinned(), page.passages[app.passage()].heads[app.model()][app.head()]?.queries);
    showSelection();
    hint.textContent = hintText();
  }

  function hintText() {
    if (!hasText) return "";
    if (!isCalled()) return "This head did not attend on this passage.";
    const hints = HINTS[isTouch ? "touch" : "pointer"];
    if (!state.get("marking")) return page.say(hints[pinned() ? "pinned" : "start"]);
    return page.say(hints.marking) + (marks.side().pictures.length ? ` ${hints.region}` : "");
  }

  function showSelection() {
    const marked = marks.units();
    const pin = pinned();
    byId("head-views").classList.toggle("marking", state.get("marking"));
    for (const view of views) {
      view.flagTexts("marked", marked);
      view.select("key", state.get("marking") ? marked : new Set());
      if (!state.get("marking")) view.select(pin?.axis ?? "query", new Set(pin ? [pin.unit] : []));
    }
  }

  function showTop() {
    const head = app.head();
    const model = page.models[app.model()];
    const {name, module} = model.heads[head];
    const role = page.role(app.model(), head);
    const other = page.role(1 - app.model(), head);
    byId("head").className = `panel ${roleClass(role)}`;
    byId("head-title").replaceChildren(
      `Head ${name}${page.allKinds.length > 1 ? `, ${kindTitle(page.kinds[head])}` : ""}`,
    );
    byId("head-role").replaceChildren(
      ...(role ? [roleBadge(role), element("strong", {}, role.title), `: ${role.rule}.`] : []),
      roleChanged(page, head)
        ? element(
            "span",
            {class: "changed-note"},
            ` In ${app.model() ? "A" : "B"} the role is “${other?.title ?? "none"}”.`,
          )
        : "",
    );
    byId("head-module").textContent = module;
    direction.hidden = !isSelf();
  }

  async function show() {
    const job = (started = {});
    hovered = null;
    showTop();
    const head = app.head();
    const isPair = state.get("model") === "difference";
    for (const id of ["head-views", "head-lists", "head-pictures"]) byId(id).classList.toggle("pair", isPair);
    for (const view of views) {
      const isHidden = !isPair && view !== shownView();
      for (const node of [view.root, view.lists, view.pictures]) node.hidden = isHidden;
    }
    byId("head-statistics").replaceChildren(statisticsTable(app, head));
    try {
      await Promise.all(views.filter(view => !view.root.hidden).map(view => view.show(head)));
    } catch (error) {
      if (job === started) hint.textContent = `The attention of this head could not be read from the file: ${error.message}`;
      return;
    }
    if (job !== started) return;
    activate();
    steps.update(shownView()?.current()?.matrix.queryUnits ?? null);
    if (pinned()) for (const view of views) if (!view.root.hidden) view.reveal(pinned());
    const examples = await exampleList(app, app.model(), head);
    if (job === started) byId("head-examples").replaceChildren(examples ?? "");
  }

  document.addEventListener("keydown", event => {
    if (event.key === "Escape" && state.get("pin") && !document.querySelector("dialog[open]")) state.set({pin: ""});
  });
  state.on(["passage", "model", "head", "words", "special", "first", "generated"], show);
  state.on(["direction", "pin", "marks", "marking"], () => {
    pressChoice(direction, state.get("direction"));
    marking.setAttribute("aria-pressed", String(state.get("marking")));
    activate();
  });
  state.on(["start"], () => views.forEach(view => view.moveCurves()));
  state.on(["scale"], () => views.forEach(view => view.matrixView.setScale(state.get("scale"))));
  app.onTheme(() => views.forEach(view => view.redraw()));
  marking.setAttribute("aria-pressed", String(state.get("marking")));
  return show();
}
