/** The views of the page; the part of the address after # names the one that is shown. */
const links = [...document.querySelectorAll("header nav a")];
const views = [...document.querySelectorAll("body > main")];

/** Shows the view that the address names, or the first one if that is unknown or not offered. */
function show() {
  const offered = links.filter((link) => !link.hidden);
  const current = offered.find((link) => link.hash === location.hash) ?? offered[0];
  for (const link of links) {
    if (link === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const view of views) view.hidden = `#${view.id}` !== current.hash;
  document.dispatchEvent(new CustomEvent("view", { detail: current.hash.slice(1) }));
}

/**
 * Offers a view or hides it: a recording has no playground, and a server has a lab only with --lab.
 * @param {string} name of the view
 * @param {boolean} isOffered
 */
export function offer(name, isOffered) {
  links.find((link) => link.hash === `#${name}`).hidden = !isOffered;
  show();
}

/** Return the name of the view that is shown. */
export function currentView() {
  return views.find((view) => !view.hidden)?.id;
}

/**
 * Goes to a view.
 * @param {string} name
 */
export function goTo(name) {
  location.hash = name;
}

addEventListener("hashchange", show);
show();
