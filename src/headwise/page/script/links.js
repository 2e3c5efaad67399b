/** List of the strongest links of a head. */
import {ROUNDED_DOWN, counted, element, formatListed, formatPercent, formatPercentAtLeast} from "./dom.js";
import {strongestLinks} from "./strongest.js";
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
  const {noun, nouns} = matrix.keyUnits;
  const isMutual = links.some(link => link.back !== null);
  const few = links.length === 1 ? "This link covers" : `These ${links.length} links cover`;
  const percent = share => (matrix.exact ? formatPercent(share) : `at least ${formatPercentAtLeast(share)}`);
  root.replaceChildren(
    element(
      "ol",
      {class: "links"},
      ...links.map(({query, key, weight, back}) =>
        element(
          "li",
          {},
          element(
            "button",
            {type: "button", class: "link", click: () => choose(query)},
            element("bdi", {}, unitName(matrix.queryUnits, query, 20)),
            back === null ? " → " : " ↔ ",
            element("bdi", {}, unitName(matrix.keyUnits, key, 20)),
          ),
          " ",
          element(
            "span",
            {class: "number"},
            [weight, back]
              .filter(each => each !== null)
              .map(each => formatListed(matrix, each))
              .join("/"),
          ),
        ),
      ),
    ),
    element(
      "p",
      {class: "soft"},
      `${few} ${percent(covered)} of the attention that is shown. A link goes from a ${matrix.queryUnits.noun} to the ` +
        `${noun} that it attends to most${noun !== "patch" ? ", special tokens and punctuation aside" : ""}.` +
        (isMutual ? ` With ↔, each of two ${nouns} attends most to the other.` : "") +
        firstNote(noun, onFirst, percent) +
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
function firstNote(noun, onFirst, percent) {
  if (onFirst === null) return "";
  return ` Links to the first ${noun} are left out; it gets ${percent(onFirst)} of the attention.`;
}
