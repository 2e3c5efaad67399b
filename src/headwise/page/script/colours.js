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

/** Return the limits of a scale of numbers. A signed scale is symmetric around 0, or starts at 0 if none is negative. */
export function scaleLimits(values, signed) {
  const finite = values.filter(Number.isFinite);
  const low = Math.min(...finite);
  const high = Math.max(...finite);
  if (!signed) return {low, high};
  if (low >= 0) return {low: 0, high};
  const size = Math.max(-low, high);
  return {low: -size, high: size};
}

/** Return a function from values to colours, with the limits and the colours of its scale. */
export function valueScale(values, signed) {
  const {low, high} = scaleLimits(values, signed);
  const all = scaleStops(signed ? "diverging" : "sequential");
  const stops = signed && low >= 0 ? all.slice((all.length - 1) / 2) : all;
  const part = value => (high > low ? (value - low) / (high - low) : Number(!signed) / 2);
  return {low, high, stops, colour: value => scaleColour(stops, part(value))};
}
