/** Steps of generation: a slider that pins one generated word after the other. */
import {element} from "./dom.js";
import {pinnedUnit} from "./meanattention.js";
import {quotedName} from "./words.js";

/**
 * Return a slider that pins the words that the model generated, {root, update(units)}. Its first step shows the mean of
 * their rows. `update` is called with the query words of the shown head, or null.
 */
export function createSteps({state, announce}) {
  const slider = element("input", {type: "range", min: 0, step: 1, value: 0, input: choose});
  const output = element("span", {class: "soft"});
  const root = element("label", {class: "field field-steps"}, element("span", {}, "Generated word"), slider, output);
  let generated = [];
  let units = null;

  function choose() {
    const step = Number(slider.value);
    state.set(step ? {pin: `q${generated[step - 1]}`, direction: "from"} : {pin: "", generated: true});
    announce(output.textContent);
  }

  function update(next) {
    units = next;
    generated = units ? [...units.generated.keys()].filter(unit => units.generated[unit]) : [];
    root.hidden = !generated.length;
    slider.max = generated.length;
    show();
  }

  function show() {
    if (!generated.length) return;
    const pin = pinnedUnit(state.get("pin"), units, units);
    const step = pin?.axis === "query" ? generated.indexOf(pin.unit) + 1 : 0;
    slider.value = step;
    output.textContent = step
      ? `${step} of ${generated.length}: ${quotedName(units, generated[step - 1], 20)}`
      : pin
        ? "another word is pinned"
        : state.get("generated")
          ? `all ${generated.length} (mean)`
          : "none: mean of all rows";
    slider.setAttribute("aria-valuetext", output.textContent);
  }

  state.on(["pin", "generated"], show);
  return {root, update};
}
