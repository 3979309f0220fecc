/** Numbers as people read them; the same words everywhere. */

export const whole = (number) => Math.round(number).toLocaleString("en");

/** Milliseconds with about three digits. */
export function ms(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return "beyond";
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** Bytes in the units that memory is sold in. */
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

/** What the caller named a request: what stands before # of a sequence's id. */
export const nameOf = (sequenceId) => sequenceId.replace(/#\d+\.\d+(@\d+)?$/s, "");

/** The request that a sequence is of, and no other by the same name. */
export const requestOf = (sequenceId) => sequenceId.replace(/(#\d+)\.\d+(@\d+)?$/s, "$1");

/** An id that fits into a cell: its beginning and its end. */
export const short = (id) => (id.length <= 22 ? id : `${id.slice(0, 12)}…${id.slice(-8)}`);
