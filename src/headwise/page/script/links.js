/** List of the strongest links of a head. */
import {ROUNDED_DOWN, counted, element, formatListed, formatPercent, formatPercentAtLeast} from "./dom.js";
import {strongestLinks} from "./attention.js";
import {unitName} from "./words.js";

/** Numbers of links in the short and in the long list. */
const LIST_LENGTHS = [8, 50];

/** Fill an element with the strongest links of a matrix. `choose(query)` is called when a link is clicked. */
export function fillLinks(root, matrix, shown, choose, isLong = false) {
  const limit = LIST_LENGTHS[Number(isLong)];
  const {links, covered, onFirst} = strongestLinks(matrix, shown.rows, shown.hiddenKeys, limit);
  if (!links.length) {
    root.replaceChildren(element("p", {class: "soft"}, "There are no links between the words that are shown."));
    return;
  }
  const few = links.length === 1 ? "This link covers" : `These ${links.length} links cover`;
  const percent = share => (matrix.exact ? formatPercent(share) : `at least ${formatPercentAtLeast(share)}`);
  root.replaceChildren(
    element(
      "ol",
      {class: "links"},
      ...links.map(({query, key, weight}) =>
        element(
          "li",
          {},
          element(
            "button",
            {type: "button", class: "link", click: () => choose(query)},
            element("bdi", {}, unitName(matrix.queryUnits, query, 20)),
            " → ",
            element("bdi", {}, unitName(matrix.keyUnits, key, 20)),
          ),
          " ",
          element("span", {class: "number"}, formatListed(matrix, weight)),
        ),
      ),
    ),
    element(
      "p",
      {class: "soft"},
      `${few} ${percent(covered)} of the attention that is shown. Links from or to ` +
        `special tokens and punctuation are left out.${firstNote(matrix, onFirst, percent)}` +
        (matrix.exact ? "" : ` ${ROUNDED_DOWN}`),
    ),
    links.length === limit || isLong
      ? element(
          "button",
          {
            type: "button",
            class: "quiet",
            click: () => {
              fillLinks(root, matrix, shown, choose, !isLong);
              root.querySelector(".quiet")?.focus();
            },
          },
          isLong ? "Show fewer links" : `Show up to ${counted(LIST_LENGTHS[1], "link")}`,
        )
      : "",
  );
}

/** Return a sentence about the first word if no link to it is listed. */
function firstNote(matrix, onFirst, percent) {
  if (onFirst === null) return "";
  const name = unitName(matrix.keyUnits, 0, 20);
  return ` No link to the first word is listed: ${percent(onFirst)} of the attention is on “${name}”.`;
}
