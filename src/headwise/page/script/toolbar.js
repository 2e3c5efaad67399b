/** Settings of the whole page: passage, model, hidden words and theme. */
import {byId, checkField, choiceButtons, element, selectField} from "./dom.js";
import {beginning, isolated} from "./words.js";

/** Fill the bar with the settings of the page, and keep it equal to the state. */
export function createToolbar(app) {
  const {page, state} = app;
  const root = byId("toolbar");

  function fill() {
    const isSwitch = (name, label, others = {}) =>
      checkField(label, state.get(name), checked => state.set({[name]: checked, ...others}));
    const sides = page.passages.flatMap(passage => passage.sides);
    const has = test => sides.some(test);
    const parts = [
      page.passages.length > 1
        ? selectField(
            page.say("Text"),
            page.passages.map((passage, index) => ({
              value: index,
              text: `${index + 1}. ${isolated(beginning(passage.title, 45))}`,
            })),
            app.passage(),
            passage => state.set({passage: Number(passage), pin: "", marks: "", start: 0}),
          )
        : null,
      page.models.length === 2
        ? choiceButtons(
            "Model",
            [
              ["A", page.labels[0]],
              ["B", page.labels[1]],
              ["difference", "B − A"],
            ],
            state.get("model"),
            model => state.set({model}),
          )
        : null,
      has(side => side.words.length < side.tokens.length) ? isSwitch("words", "merge word pieces", {pin: "", start: 0}) : null,
      has(side => side.special.includes(1) || side.special.includes(true))
        ? isSwitch("special", "hide special tokens")
        : null,
      page.passages.length ? isSwitch("first", "hide the first token") : null,
      has(side => side.generated !== null) ? isSwitch("generated", "only rows of generated words") : null,
      has(side => side.pictures.length) ? opacityField(state) : null,
      element("span", {class: "spring"}),
      selectField(
        "Theme",
        ["system", "light", "dark"].map(theme => ({value: theme, text: theme})),
        state.get("theme"),
        theme => state.set({theme}),
      ),
      element(
        "button",
        {
          type: "button",
          class: "help-button",
          "aria-label": "Keyboard shortcuts and help",
          title: "Keyboard shortcuts and help",
          click: () => byId("help").showModal(),
        },
        "?",
      ),
    ];
    const focused = [...root.querySelectorAll("button, input, select")].indexOf(document.activeElement);
    root.replaceChildren(...parts.filter(Boolean));
    if (focused >= 0) root.querySelectorAll("button, input, select")[focused]?.focus();
  }

  const veil = () => document.documentElement.style.setProperty("--opacity", Math.min(state.get("opacity"), 100) / 100);
  state.on(["passage", "model"], fill);
  state.on(["opacity"], veil);
  state.onRestore(fill);
  veil();
  fill();
}

/** Return a slider for the opacity of the veil on patches with little attention, or of the colours of differences. */
function opacityField(state) {
  const slider = element("input", {
    type: "range",
    min: 0,
    max: 100,
    step: 5,
    value: state.get("opacity"),
    input: () => state.set({opacity: Number(slider.value)}),
  });
  return element("label", {class: "field"}, element("span", {}, "Opacity"), slider);
}

/** Set the theme of the page, and call the listeners of `app.onTheme` when it changes. Paper is always light. */
export function createTheme(state) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const print = matchMedia("print");
  const listeners = [];
  function update() {
    const theme = state.get("theme");
    const isDark = theme === "dark" || (theme !== "light" && dark.matches);
    const next = isDark && !print.matches ? "dark" : "light";
    if (document.documentElement.dataset.theme === next) return;
    document.documentElement.dataset.theme = next;
    for (const listener of listeners) listener();
  }
  for (const query of [dark, print]) query.addEventListener("change", update);
  state.on(["theme"], update);
  update();
  return listener => {
    listeners.push(listener);
  };
}
