/** Geometry of keyboard navigation. */

/** Return the element of the next line below or above that is closest to an element, or undefined at the end. */
export function nearestInLine(elements, at, isDown) {
  const from = elements[at].getBoundingClientRect();
  const step = isDown ? 1 : -1;
  let best;
  let line = null;
  let distance = Infinity;
  for (let place = at + step; elements[place]; place += step) {
    const box = elements[place].getBoundingClientRect();
    if (Math.abs(box.top - from.top) < from.height / 2) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > from.height / 2) break;
    const apart = Math.abs(box.left + box.width / 2 - from.left - from.width / 2);
    if (apart < distance) [best, distance] = [elements[place], apart];
  }
  return best;
}
