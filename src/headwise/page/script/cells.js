/** Cells of the overview: one button for each head, with its thumbnail or a coloured square. */
import {element, formatNumber, formatPercent, formatShort, nextTask} from "./dom.js";
import {
  cssColour,
  inkOn,
  mixed,
  propertyColour,
  roleClass,
  roleColour,
  roleMark,
  scaleColour,
  scaleStops,
  valueScale,
} from "./colours.js";
import {shownValue, statisticTitle} from "./data.js";
import {kindTitle, shortKind} from "./kinds.js";
import {drawDifference, drawTiles} from "./thumbnail.js";
import {drawOverlay, imageOf, overlayName, overlayOf} from "./overlay.js";
import {colourStatistic, isDiverging, roleChanged} from "./filter.js";

/** Smallest and largest width of a thumbnail in CSS pixels, and the area that the thumbnails of all heads may fill. */
const CELL_SIZES = [64, 120];
const CELL_AREA = 360_000;

/** Time after which the painting of cells makes a pause, in milliseconds. */
const LONGEST_TASK = 20;

/** Return the least width of the thumbnails of a number of heads: the fewer heads, the larger they are. */
export function cellSize(heads) {
  const [least, most] = CELL_SIZES;
  return Math.min(Math.max(Math.round(Math.sqrt(CELL_AREA / heads)), least), most);
}

/** Return the buttons of all heads: {buttons, repaint()}. Only those that are on screen are painted. */
export function createCells(app) {
  const {page, state} = app;
  const stale = new Set();
  const onScreen = new Set();
  let painting = {};
  const buttons = page.heads.map((head, index) =>
    element(
      "button",
      {type: "button", class: "cell", "data-head": index, tabindex: -1},
      element("span", {class: "cell-picture", "aria-hidden": "true"}),
      element("span", {class: "cell-name", "aria-hidden": "true"}, head.name.split(" ").pop()),
      page.allKinds.length > 1
        ? element("span", {class: "cell-kind", "aria-hidden": "true"}, shortKind(page.kinds[index]))
        : null,
      element("span", {class: "cell-share", "aria-hidden": "true"}),
      element("span", {class: "visually-hidden"}),
    ),
  );
  const observer = new IntersectionObserver(
    entries => {
      for (const entry of entries) {
        const index = Number(entry.target.dataset.head);
        if (entry.isIntersecting) onScreen.add(index);
        else onScreen.delete(index);
      }
      paintStale();
    },
    {rootMargin: "300px"},
  );
  buttons.forEach(button => observer.observe(button));
  const print = matchMedia("print");
  print.addEventListener("change", paintStale);

  async function repaint() {
    const started = (painting = {});
    describe();
    const passage = app.passage();
    const models = state.get("model") === "difference" ? [0, 1] : [app.model()];
    const statistic = colourStatistic(page, state);
    const tiles = page.passages.length ? await Promise.all(models.map(model => page.tiles(passage, model))) : [];
    if (started !== painting) return;
    painting.tiles = tiles;
    painting.statistic = statistic;
    painting.overlay = overlayName(app);
    if (statistic !== null) {
      painting.scale = valueScale(
        page.heads.map((_, head) => shownValue(page, state.get("model"), statistic, head)),
        isDiverging(page, state, statistic),
      );
    }
    buttons.forEach((_, index) => stale.add(index));
    paintStale();
  }

  function paintStale() {
    if (!painting.tiles) return;
    if (painting.overlay !== null) {
      paintOverlays(painting);
      return;
    }
    // On paper all cells are visible, and there is no time to wait until they come on screen.
    const indices = (print.matches ? [...stale] : [...onScreen]).filter(index => stale.delete(index));
    // Sizes are read before the first change, because each change would make the browser compute the layout again.
    const sizes = indices.map(index => canvasSize(buttons[index].firstElementChild));
    indices.forEach((index, place) => paint(index, sizes[place]));
  }

  /** Paint one cell after the other, after the text of the chosen head, and so that the page answers in between. */
  async function paintOverlays(started) {
    if (started.isBusy) return;
    started.isBusy = true;
    await app.nextFrame();
    if (started !== painting) return;
    let paused = performance.now();
    const next = () => [...stale].find(index => print.matches || onScreen.has(index));
    for (let index = next(); index !== undefined; index = next()) {
      stale.delete(index);
      const overlay = await overlayOf(app, app.model(), index, started.overlay);
      const image = overlay && (await imageOf(overlay.picture));
      if (performance.now() - paused > LONGEST_TASK) {
        await nextTask();
        paused = performance.now();
      }
      if (started !== painting) return;
      const button = buttons[index];
      button.querySelector(".cell-share").textContent = overlay ? formatPercent(overlay.share) : "";
      if (overlay) {
        const canvas = element("canvas", {"aria-hidden": "true"});
        // All cells have the same size.
        started.size ??= canvasSize(button.firstElementChild);
        drawOverlay(canvas, image, overlay, started.size, state.get("opacity") / 100);
        button.firstElementChild.replaceChildren(canvas);
      } else button.firstElementChild.replaceChildren(emptyCell());
    }
    started.isBusy = false;
  }

  function paint(index, size) {
    buttons[index].querySelector(".cell-share").textContent = "";
    const picture = buttons[index].firstElementChild;
    const {tiles, statistic, scale} = painting;
    if (statistic !== null) {
      const value = shownValue(page, state.get("model"), statistic, index);
      paintSquare(picture, value, Number.isFinite(value) ? scale.colour(value) : propertyColour("--ground"));
    } else if (tiles.length) {
      paintTiles(
        picture,
        tiles.map(heads => heads[index]),
        page.role(app.model(), index),
        size,
      );
    } else {
      const role = page.role(app.model(), index);
      const value = mainValue(index).value;
      paintSquare(
        picture,
        value,
        mixed(propertyColour("--panel"), roleColour(role), 0.2 + 0.6 * Math.min(Math.abs(value) || 0, 1)),
      );
    }
  }

  /** Set the class and the accessible name of each cell. */
  function describe() {
    buttons.forEach((button, index) => {
      const role = page.role(app.model(), index);
      const {name, value} = mainValue(index);
      const changed = roleChanged(page, index);
      button.className = `cell ${roleClass(role)}${changed ? " changed" : ""}`;
      const parts = [
        `Head ${page.heads[index].name}`,
        page.allKinds.length > 1 ? kindTitle(page.kinds[index]) : null,
        role?.title,
        Number.isFinite(value) ? `${name} ${formatNumber(value)}` : null,
        changed ? "another role in the other model" : null,
      ];
      button.title = button.lastElementChild.textContent = parts.filter(Boolean).join(", ");
    });
  }

  function mainValue(index) {
    const role = page.role(app.model(), index);
    const statistic = colourStatistic(page, state) ?? Math.max(page.statisticIndex(role?.statistic), 0);
    if (!page.statistics[statistic]) return {name: "", value: NaN};
    return {name: statisticTitle(page, statistic), value: shownValue(page, state.get("model"), statistic, index)};
  }

  return {buttons, repaint};
}

function paintSquare(picture, value, colour) {
  const square = element("span", {class: "cell-value"}, formatShort(value));
  square.style.setProperty("--square", cssColour(colour));
  square.style.setProperty("--square-ink", inkOn(colour));
  picture.replaceChildren(square);
}

function paintTiles(picture, tiles, role, size) {
  if (tiles.some(each => !each)) {
    picture.replaceChildren(emptyCell());
    return;
  }
  const canvas = element("canvas", {"aria-hidden": "true"});
  if (tiles.length === 2) {
    const stops = scaleStops("diverging");
    drawDifference(canvas, tiles[0], tiles[1], size, part => scaleColour(stops, (part + 1) / 2));
  } else {
    drawTiles(canvas, tiles[0], size, propertyColour("--panel"), roleColour(role));
  }
  picture.replaceChildren(canvas);
}

/** Return what the cell of a head shows that did not attend. */
function emptyCell() {
  return element("span", {class: "cell-value cell-empty"}, "–");
}

function canvasSize(picture) {
  return Math.round((picture.clientWidth || CELL_SIZES[0]) * Math.max(window.devicePixelRatio, 1));
}

/** Return the mark of a role: its letter on its colour. */
export function roleBadge(role) {
  return element("span", {class: `badge ${roleClass(role)}`, "aria-hidden": "true"}, roleMark(role));
}
