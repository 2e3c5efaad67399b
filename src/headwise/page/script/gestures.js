/** Pointer, wheel and keyboard gestures that zoom and move a plot. */

/** Pixels that an arrow key moves the plot. */
const KEY_STEP = 48;

/**
 * Listen to gestures on a plot.
 *
 * @param plot element that can have the keyboard focus
 * @param actions {place(event), zoom(factor, x, y), pan(dx, dy), reset(), hover(event or null)}
 */
export function addGestures(plot, {place, zoom, pan, reset, hover}) {
  const pointers = new Map();
  plot.addEventListener("pointerdown", event => {
    pointers.set(event.pointerId, event);
    plot.setPointerCapture(event.pointerId);
  });
  for (const name of ["pointerup", "pointercancel"])
    plot.addEventListener(name, event => pointers.delete(event.pointerId));
  plot.addEventListener("pointermove", event => {
    const before = pointers.get(event.pointerId);
    if (!before) {
      hover(event);
      return;
    }
    if (pointers.size === 1) pan(event.clientX - before.clientX, event.clientY - before.clientY);
    else {
      const other = [...pointers.values()].find(pointer => pointer.pointerId !== event.pointerId);
      const centre = place(other);
      const distance = pointer => Math.hypot(pointer.clientX - other.clientX, pointer.clientY - other.clientY);
      zoom(distance(event) / Math.max(distance(before), 1), centre.x, centre.y);
    }
    pointers.set(event.pointerId, event);
  });
  plot.addEventListener("pointerleave", () => hover(null));
  plot.addEventListener(
    "wheel",
    event => {
      // Without focus the wheel scrolls the page.
      if (!event.ctrlKey && document.activeElement !== plot) return;
      event.preventDefault();
      const {x, y} = place(event);
      zoom(Math.exp(-event.deltaY / 300), x, y);
    },
    {passive: false},
  );
  plot.addEventListener("keydown", event => {
    const action = {
      "+": () => zoom(1.6),
      "=": () => zoom(1.6),
      "-": () => zoom(1 / 1.6),
      0: reset,
      ArrowLeft: () => pan(KEY_STEP, 0),
      ArrowRight: () => pan(-KEY_STEP, 0),
      ArrowUp: () => pan(0, KEY_STEP),
      ArrowDown: () => pan(0, -KEY_STEP),
    }[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });
}
