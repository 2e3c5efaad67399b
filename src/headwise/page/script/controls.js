/** Controls of the overview: search, colours, groups, order and filters. */
import {byId, checkField, element, selectField} from "./dom.js";
import {statisticTitle} from "./data.js";
import {colourStatistic} from "./filter.js";
import {overlayName, overlayOptions} from "./overlay.js";

/** Fill the controls of the overview and keep them equal to the state. */
export function createControls(app) {
  const root = byId("overview-controls");
  const filters = byId("overview-filters");
  const {page, state} = app;
  const statistics = page.statistics.map((statistic, index) => ({
    value: index,
    text: statisticTitle(page, index),
    group: statistic.source,
  }));
  const roles = page.roles.length > 0;

  function fill() {
    const search = inputField("Search", "search", "search", page.passages.length ? page.say("5.11 or a word") : "5.11");
    root.replaceChildren(
      search,
      selectField(
        "Colour by",
        [...pictures(), ...statistics],
        colourStatistic(page, state) ?? (overlayName(app) === null ? pictures()[0]?.value : state.get("colour")),
        colour => state.set({colour}),
      ),
      selectField(
        "Group by",
        [
          ...(roles ? [{value: "role", text: "role"}] : []),
          {value: "layer", text: "layer"},
          ...(page.allKinds.length > 1 ? [{value: "kind", text: "kind of attention"}] : []),
          {value: "none", text: "no groups"},
        ],
        state.get("group"),
        group => state.set({group}),
      ),
      selectField("Sort by", [{value: "", text: "layer and head"}, ...statistics], state.get("sort"), sort =>
        state.set({sort}),
      ),
    );
    filters.replaceChildren(
      ...[
        roles
          ? element(
              "fieldset",
              {class: "field-roles"},
              element("legend", {}, "Roles"),
              ...page.roles.map((role, index) =>
                checkField(role.title, state.get("roles").includes(String(index)), checked =>
                  toggleRole(String(index), checked),
                ),
              ),
            )
          : null,
        inputField("Layers", "layers", "text", "3 or 2-5"),
        page.allKinds.length > 1
          ? selectField(
              "Kind",
              [{value: "", text: "all"}, ...page.allKinds.map(kind => ({value: kind, text: kind}))],
              state.get("kind"),
              kind => state.set({kind}),
            )
          : null,
        statistics.length
          ? selectField("Values of", [{value: "", text: "any statistic"}, ...statistics], state.get("range"), range =>
              state.set({range}),
            )
          : null,
        statistics.length ? inputField("from", "from", "number") : null,
        statistics.length ? inputField("to", "to", "number") : null,
        page.models.length === 2 && roles
          ? checkField("only heads whose role changed", state.get("changed"), changed => state.set({changed}))
          : null,
        element("button", {type: "button", click: clear}, "Remove all filters"),
      ].filter(Boolean),
    );
  }

  function pictures() {
    if (state.get("model") === "difference")
      return page.passages.length ? [{value: "pictures", text: "difference of weights"}] : [];
    const overlays = page.passages.length ? overlayOptions(page.passages[app.passage()]) : [];
    return roles || page.passages.length ? [{value: "role", text: "role"}, ...overlays] : [];
  }

  function toggleRole(role, checked) {
    const others = state.get("roles").filter(other => other !== role);
    state.set({roles: checked ? [...others, role] : others});
  }

  function inputField(label, name, type, placeholder) {
    let timer = 0;
    const input = element("input", {
      type,
      placeholder,
      value: state.get(name),
      step: type === "number" ? "any" : null,
      "data-setting": name,
      input: () => {
        clearTimeout(timer);
        timer = setTimeout(() => state.set({[name]: input.value}), 200);
      },
    });
    return element("label", {class: `field field-${name}`}, element("span", {}, label), input);
  }

  function clear() {
    state.set({roles: [], layers: "", kind: "", range: "", from: "", to: "", changed: false, search: ""});
    fill();
  }

  state.onRestore(fill);
  state.on(["model", "passage"], fill);
  fill();
}
