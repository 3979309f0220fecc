/**
 * Makes an element.
 * @param {string} tag of HTML
 * @param {object} properties of the element; `dataset` and names with a dash (ARIA) are set as they are in HTML
 * @param {...(Node|string)} children
 * @returns {HTMLElement}
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "dataset") Object.assign(element.dataset, value);
    else if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/**
 * A part of a view: a section with its heading.
 * @param {string} id
 * @param {string} title
 * @param {...(Node|string)} children
 */
export function panel(id, title, ...children) {
  return el("section", { id, className: "panel", "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
}

/** Sets an element's text; changes the page only if the text differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Resizes a canvas to its parent, for any pixel ratio; returns a context whose unit is a CSS pixel.
 * @param {HTMLCanvasElement} canvas
 * @param {number} height in CSS pixels
 */
export function sized(canvas, height) {
  const width = Math.max(1, Math.round(canvas.parentElement.clientWidth));
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/**
 * Makes a canvas whose items can be chosen by keys; screen readers see a slider.
 * @param {string} label
 */
export function chooser(label) {
  const canvas = el("canvas", { tabIndex: 0, role: "slider", "aria-label": label });
  choose(canvas, 0, 0, 0, "none");
  return canvas;
}

/** Announces the chosen item to screen readers, by number and in words, if it changed. */
export function choose(canvas, number, least, most, words) {
  const said = { valuemin: least, valuemax: most, valuenow: number, valuetext: words };
  for (const [name, value] of Object.entries(said)) {
    if (canvas.getAttribute(`aria-${name}`) !== String(value)) canvas.setAttribute(`aria-${name}`, value);
  }
}

const COLOURS = {};
const scheme = matchMedia("(prefers-color-scheme: dark)");
scheme.addEventListener("change", () => {
  for (const name of Object.keys(COLOURS)) delete COLOURS[name];
  document.dispatchEvent(new Event("scheme"));
});

/** Return a custom property of the style sheet, so that canvases use its light and dark colours. */
export function colour(name) {
  COLOURS[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return COLOURS[name];
}
