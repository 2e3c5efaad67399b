/** Drawing of a rectangle on a picture, by mouse or touch. */
import {element} from "./dom.js";

/** Movement of the pointer from which it draws a rectangle, in pixels. */
const LEAST_MOVEMENT = 5;

/**
 * Listen to a pointer that draws rectangles on pictures.
 *
 * @param strip element with the frames of the pictures
 * @param isActive function that returns true while rectangles can be drawn
 * @param drawn called with the index of the picture and the rectangle {left, top, right, bottom} in fractions
 */
export function addRegions(strip, isActive, drawn) {
  const frames = [...strip.querySelectorAll(".picture-frame")];
  frames.forEach((frame, picture) => {
    let start = null;
    let outline = null;
    const place = event => {
      const box = frame.getBoundingClientRect();
      const part = (value, from, size) => Math.min(Math.max((value - from) / size, 0), 1);
      return {x: part(event.clientX, box.left, box.width), y: part(event.clientY, box.top, box.height)};
    };
    const stop = () => {
      outline?.remove();
      start = outline = null;
    };
    const rectangle = event => {
      const {x, y} = place(event);
      const from = start.place;
      return {left: Math.min(x, from.x), top: Math.min(y, from.y), right: Math.max(x, from.x), bottom: Math.max(y, from.y)};
    };
    frame.addEventListener("pointerdown", event => {
      stop();
      if (isActive() && event.isPrimary && !event.button) start = {event, place: place(event)};
    });
    frame.addEventListener("pointermove", event => {
      if (!start || !event.isPrimary) return;
      if (!outline) {
        const {clientX, clientY} = start.event;
        if (Math.hypot(event.clientX - clientX, event.clientY - clientY) < LEAST_MOVEMENT) return;
        // From now on the frame gets all events, so that the end of the movement is no click on a patch.
        frame.setPointerCapture(event.pointerId);
        frame.append((outline = element("span", {class: "region"})));
      }
      const {left, top, right, bottom} = rectangle(event);
      const sizes = {left, top, width: right - left, height: bottom - top};
      for (const [name, size] of Object.entries(sizes)) outline.style.setProperty(name, `${100 * size}%`);
    });
    frame.addEventListener("pointerup", event => {
      if (outline) drawn(picture, rectangle(event));
      stop();
    });
    frame.addEventListener("pointercancel", stop);
    // The browser would drag the image.
    frame.addEventListener("dragstart", event => event.preventDefault());
  });
}
