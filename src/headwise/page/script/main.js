/** Start of the page. */
import {byId, counted, element, scrollToPart} from "./dom.js";
import {loadContents} from "./data.js";
import {createState, windowState} from "./state.js";
import {chosenHeads} from "./filter.js";
import {createTheme, createToolbar} from "./toolbar.js";
import {createFoci} from "./foci.js";
import {createOverview} from "./overview.js";
import {createHead} from "./head.js";
import {createFind} from "./find.js";
import {createTray} from "./tray.js";
import {createShortcuts} from "./shortcuts.js";

/** Return the context that all parts of the page share. */
function pageContext(page, state) {
  const first = firstHead(page);
  const app = {
    page,
    state,
    onTheme: createTheme(state),
    passage: () => Math.min(state.get("passage"), Math.max(page.passages.length - 1, 0)),
    model: () => (state.get("model") === "B" && page.models.length === 2 ? 1 : 0),
    head: () => Math.max(page.headIndex(state.get("head")), state.get("head") ? 0 : first),
    nextFrame: () =>
      new Promise(resolve => {
        requestAnimationFrame(() => setTimeout(resolve, 0));
      }),
    announce: text => {
      byId("live").textContent = text;
    },
    choose(head, isFarAway = true) {
      const [before, next] = [app.head(), head].map(each => page.passages[app.passage()]?.heads[app.model()][each]);
      // The pinned word of a head is no word of a head that attends between other sides.
      const isSame = !before || !next || (before.queries === next.queries && before.keys === next.keys);
      state.set({head: page.heads[head].name, ...(isSame ? {} : {pin: ""})});
      app.announce(`Head ${page.heads[head].name}`);
      const {top} = byId("head").getBoundingClientRect();
      if (isFarAway && (top > innerHeight * 0.6 || top < -200)) scrollToPart("head");
    },
  };
  return app;
}

/**
 * Return the head that is shown first: the best head of the first focus, the first of the order in which the page opens, or
 * the first head of the first role. If the model wrote words, it is a head of the text with these words.
 */
function firstHead(page) {
  const scores = page.foci?.[0]?.scores ?? [];
  const best = Array.isArray(scores[0]) ? scores[0][0] : scores[0];
  const {heads} = page.models[0];
  const {sides = [], heads: [attention = []] = []} = page.passages[0] ?? {};
  const someWrite = sides.some(side => side.generated !== null);
  const writes = head => !someWrite || (sides[attention[head]?.queries] ?? {generated: null}).generated !== null;
  return (
    best?.head ??
    (page.opening.sort ? chosenHeads(page, createState("", () => {}, page.opening))[0] : null) ??
    [
      heads.findIndex((head, index) => head.role === 0 && writes(index)),
      heads.findIndex((_, index) => writes(index)),
      0,
    ].find(index => index >= 0)
  );
}

function showSummary({models, heads, notes, passages, allKinds, say}) {
  const layers =
    allKinds.length > 1
      ? counted(new Set(heads.map(head => head.module)).size, "attention module")
      : counted(new Set(heads.map(head => `${head.name.split(" ").slice(0, -1)} ${head.layer}`)).size, "layer");
  const names = models.length === 2 ? `A is ${models[0].name}, B is ${models[1].name}. ` : "";
  const texts = passages.length > 1 ? ` on ${counted(passages.length, say("text"))}` : "";
  byId("summary").textContent = `${names}${counted(heads.length, "attention head")} in ${layers}${texts}`;
  byId("notes").append(...notes.map(note => element("p", {}, note)));
}

async function start() {
  const page = await loadContents();
  const state = windowState(window, page.opening);
  const app = pageContext(page, state);
  showSummary(page);
  for (const node of document.querySelectorAll("[data-nouns]")) node.textContent = page.say(node.textContent);
  createToolbar(app);
  createFoci(app);
  createOverview(app);
  const shown = createHead(app);
  createFind(app);
  createTray(app);
  createShortcuts(app);
  byId("skip").addEventListener("click", event => {
    event.preventDefault();
    scrollToPart("head");
    byId("head").focus({preventScroll: true});
  });
  await shown;
  document.documentElement.dataset.ready = "true";
}

start().catch(error => {
  byId("summary").textContent = `The page could not be shown: ${error.message}`;
  throw error;
});
