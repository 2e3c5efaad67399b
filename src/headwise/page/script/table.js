/** Table of a head's statistics, and the passages in which the head is most typical. */
import {element, formatNumber, ordinal} from "./dom.js";
import {rankOf, shownValue} from "./data.js";
import {beginning, isolated} from "./words.js";

/** Number of passages that are listed as examples. */
const EXAMPLES = 5;

/** Return the statistics of a head as a table, in groups by what they were measured on. */
export function statisticsTable(app, head) {
  const {page, state} = app;
  const isPair = page.models.length === 2;
  const view = state.get("model");
  const isKnown = value => page.statistics.some((_, index) => value(0, index, head));
  const hasErrors = isKnown((...place) => Number.isFinite(page.error(...place)));
  const hasCounts = isKnown((...place) => page.samples(...place) > 1);
  const columns = isPair
    ? [...page.labels, "B − A", view === "difference" ? "rank of B − A" : `rank in ${view}`]
    : ["mean", hasErrors && "standard error", hasCounts && "samples", "rank"].filter(Boolean);
  const sources = [...new Set(page.statistics.map(statistic => statistic.source))];
  const bodies = sources.map(source =>
    element(
      "tbody",
      {},
      element("tr", {}, element("th", {class: "source", colspan: columns.length + 1, scope: "rowgroup"}, source)),
      ...page.statistics.flatMap((statistic, index) =>
        statistic.source === source ? [statisticRow(statistic, index)] : [],
      ),
    ),
  );

  function statisticRow(statistic, index) {
    const cells = isPair
      ? [0, 1]
          .map(model => withError(page.mean(model, index, head), page.error(model, index, head)))
          .concat(formatNumber(shownValue(page, "difference", index, head)))
      : [
          formatNumber(page.mean(0, index, head)),
          ...(hasErrors ? [formatNumber(page.error(0, index, head))] : []),
          ...(hasCounts ? [formatCount(page.samples(0, index, head))] : []),
        ];
    const place = rankOf(page, view, index, head);
    return element(
      "tr",
      {},
      element(
        "th",
        {scope: "row", title: statistic.meaning || null},
        statistic.name,
        statistic.unit ? element("span", {class: "soft"}, ` (${statistic.unit})`) : null,
      ),
      ...[...cells, rankText(place)].map(text => element("td", {}, text)),
    );
  }

  return element(
    "table",
    {class: "statistics"},
    element(
      "caption",
      {},
      `Statistics. Rank 1 = largest ${view === "difference" ? "difference B − A" : "value"} of all heads.`,
    ),
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        element("th", {scope: "col"}, "statistic"),
        ...columns.map(name => element("th", {scope: "col"}, name)),
      ),
    ),
    ...bodies,
  );
}

/** Return the rank of a head as text, or "–" if most heads have the same value. */
export function rankText(place) {
  if (!place || place.last - place.first + 1 > place.of / 2) return "–";
  const first = ordinal(place.first);
  return place.first === place.last
    ? `${first} of ${place.of}`
    : `tied, ${first} to ${ordinal(place.last)} of ${place.of}`;
}

function withError(mean, error) {
  return Number.isFinite(error) && Number.isFinite(mean)
    ? `${formatNumber(mean)} ± ${formatNumber(error)}`
    : formatNumber(mean);
}

function formatCount(number) {
  return number > 0 ? Math.round(number).toLocaleString("en-US") : "–";
}

/**
 * Return the passages with the largest values of the statistic that decides the head's role, or null if the page has no
 * other passages than these. No statistic decides the role "mixed".
 */
export async function exampleList(app, model, head) {
  const {page, state} = app;
  const role = page.role(model, head);
  const statistic = role && role.name !== "mixed" ? page.statisticIndex(role.statistic) : -1;
  if (page.passages.length <= EXAMPLES || statistic < 0) return null;
  const values = await Promise.all(
    page.passages.map((_, passage) => page.meanOnPassage(passage, model, statistic, head)),
  );
  const known = [...values.keys()].filter(passage => Number.isFinite(values[passage]));
  if (known.length <= EXAMPLES) return null;
  const order = known.sort((a, b) => values[b] - values[a]).slice(0, EXAMPLES);
  return element(
    "div",
    {class: "examples"},
    element("h3", {}, "Passages in which the head is most typical"),
    element(
      "p",
      {class: "soft"},
      `The statistic “${role.statistic}” decides the role “${role.title}”. It is largest on these passages.`,
    ),
    element(
      "ol",
      {},
      ...order.map(passage =>
        element(
          "li",
          {},
          element(
            "button",
            {
              type: "button",
              class: "link",
              "aria-current": passage === app.passage() ? "true" : null,
              click: () => state.set({passage, pin: "", marks: "", start: 0}),
            },
            isolated(beginning(page.passages[passage].title, 80)),
          ),
          " ",
          element("span", {class: "number"}, formatNumber(values[passage])),
        ),
      ),
    ),
  );
}
