/** Colours of roles and of scales. Both are CSS custom properties, so that each theme has its own. */

const ROLES = {
  "previous token": ["previous", "P"],
  "next token": ["next", "N"],
  induction: ["induction", "I"],
  "duplicate token": ["duplicate", "D"],
  "same token": ["same", "S"],
  mixed: ["mixed", "M"],
  broad: ["broad", "B"],
  "sink on the first token": ["first", "F"],
  "sink on special tokens": ["special", "T"],
};

/** Return the CSS class of a role's colour. */
export function roleClass(role) {
  return `role-${ROLES[role?.name]?.[0] ?? "other"}`;
}

/** Return the letter that marks a role. */
export function roleMark(role) {
  return ROLES[role?.name]?.[1] ?? (Array.from(role?.title ?? "")[0]?.toUpperCase() || "?");
}

/** Return the class that sets a colour of the comparison. */
export function seriesClass(place) {
  return `series-${place % 8}`;
}

/** Return the red, green and blue of a "#rrggbb" colour. */
export function channels(colour) {
  return [1, 3, 5].map(place => parseInt(colour.trim().slice(place, place + 2), 16));
}

/** Return the value of a CSS custom property of the page, as [red, green, blue]. */
export function propertyColour(name, node = document.documentElement) {
  return channels(getComputedStyle(node).getPropertyValue(name));
}

/** Return the colour of an element's role, as [red, green, blue]. */
export function roleColour(role) {
  return propertyColour(`--${roleClass(role)}`);
}

/** Return a colour between two colours: the first at 0, the second at 1. */
export function mixed(from, to, part) {
  return from.map((channel, place) => Math.round(channel + (to[place] - channel) * part));
}

/** Return a colour as CSS text. */
export function cssColour(rgb) {
  return `rgb(${rgb.join(", ")})`;
}

/** Return the colour between the colours of a scale, for a part from 0 to 1. */
export function scaleColour(stops, part) {
  const place = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return mixed(stops[low], stops[low + 1], place - low);
}

/** Return the colours of the scale "sequential" or "diverging" of the theme. */
export function scaleStops(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).split(",").map(channels);
}

/** Return black or white, whichever is easier to read on a colour. */
export function inkOn(rgb) {
  const [red, green, blue] = rgb.map(channel =>
    channel / 255 <= 0.04045 ? channel / 255 / 12.92 : ((channel / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000000" : "#ffffff";
}

/** Return a function from values to colours, and the limits of its scale. Signed scales are symmetric around 0. */
export function valueScale(values, signed) {
  const finite = values.filter(Number.isFinite);
  let low = Math.min(...finite);
  let high = Math.max(...finite);
  if (signed) {
    high = Math.max(Math.abs(low), Math.abs(high));
    low = -high;
  }
  const stops = scaleStops(signed ? "diverging" : "sequential");
  return {low, high, stops, colour: value => scaleColour(stops, high > low ? (value - low) / (high - low) : 0.5)};
}
