/** Formatting of numbers and ids, the same everywhere on the page. */

export const whole = (number) => Math.round(number).toLocaleString("en");

/** Return milliseconds with about three digits. */
export function ms(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return "beyond";
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** Return bytes in decimal units. */
export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = number;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value.toFixed(unit === 0 || value >= 100 ? 0 : 1)} ${units[unit]}`;
}

/** Return the request's name as the caller knows it: the part of a sequence's id before #. */
export const nameOf = (sequenceId) => sequenceId.replace(/#\d+\.\d+(@\d+)?$/s, "");

/** Return the id of a sequence's request, unique even if names repeat. */
export const requestOf = (sequenceId) => sequenceId.replace(/(#\d+)\.\d+(@\d+)?$/s, "$1");

/** Return an id shortened to its beginning and end. */
export const short = (id) => (id.length <= 22 ? id : `${id.slice(0, 12)}…${id.slice(-8)}`);
