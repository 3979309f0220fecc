/** What the two sides came to: figures, tokens, lanes. */
import { colour, el, sized } from "./dom.js";
import { whole } from "./words.js";

const FIGURES = [
  ["output_tokens_per_s", "tokens per second", true],
  ["duration_s", "all of it, s", false],
  ["ttft_p50_ms", "TTFT p50, ms", false],
  ["ttft_p99_ms", "TTFT p99, ms", false],
  ["tpot_p50_ms", "TPOT p50, ms", false],
  ["itl_p50_ms", "ITL p50, ms", false],
  ["itl_p99_ms", "ITL p99, ms", false],
  ["longest_gap_ms", "longest gap between two tokens, ms", false],
  ["e2e_p50_ms", "whole answer, p50, ms", false],
  ["most_running", "sequences at once", null],
  ["num_preemptions", "preemptions", null],
  ["cached_share", "prompt tokens found in the cache, share", null],
  ["tokens_per_pass", "tokens per pass", null],
  ["kv_capacity_tokens", "room in KV memory, tokens", null],
];
const LANE = 10;
const KINDS = { prefill: "prefill", recompute: "prefill", decode: "decode", stalled: "stalled", preempted: "stalled", transfer: "transfer" };

/**
 * The parts of the page that show an experiment.
 * @param {object} now its status, as the API has it
 * @param {object|undefined} story that it tells
 * @returns {HTMLElement[]}
 */
export function sidesOf(now, story) {
  const { a, b } = now.results;
  if (!a) return [];
  const titles = { a: story?.a_title ?? settingsInWords(now.experiment.a), b: story?.b_title ?? settingsInWords(now.experiment.b) };
  const parts = [];
  if (now.verdict) parts.push(verdictOf(now, story, a.figures, b.figures));
  const lanes = ["a", "b"].filter((side) => now.results[side]);
  const endMs = Math.max(...lanes.flatMap((side) => now.results[side].lanes.flatMap(({ segments }) => segments.map(([, start, took]) => start + took))));
  for (const side of lanes) parts.push(chartOf(side, titles[side], now.results[side].lanes, endMs));
  parts.push(tableOf(titles, a.figures, b?.figures, story?.figure));
  return parts;
}

function verdictOf(now, story, a, b) {
  const { num_equal, num_requests, why, explanation } = now.verdict;
  const tokens = num_equal === num_requests ? `Tokens: equal for all ${num_requests} requests.` : `Tokens: equal for ${num_equal} of ${num_requests} requests.`;
  const headline = story ? [el("p", { className: "headline" }, `${story.figure_title}: `, el("b", {}, inFigures(a[story.figure])), ` (${story.a_title}), `, el("b", {}, inFigures(b[story.figure])), ` (${story.b_title}): ${comparison(a[story.figure], b[story.figure])}`)] : [];
  return el("div", { className: "verdict" }, ...headline, el("p", { className: "tokens" }, `${tokens} ${why}`), ...(explanation ? [el("p", {}, explanation)] : []));
}

/** How the second figure stands to the first. */
export function comparison(a, b) {
  if (!a || !b) return "";
  const share = b / a;
  if (Math.abs(share - 1) < 0.02) return "the same.";
  return `${share.toFixed(2)} times as much.`;
}

function tableOf(titles, a, b, chosen) {
  const rows = FIGURES.filter(([name]) => a[name] !== null || b?.[name] != null).map(([name, title, isBetterHigh]) => {
    const better = !b || isBetterHigh === null || a[name] === b[name] ? "" : b[name] > a[name] === isBetterHigh ? "b" : "a";
    const cell = (side, value) => el("td", { className: better === side ? "better" : "" }, inFigures(value), better === side ? el("span", { className: "visually-hidden" }, " (better)") : "");
    return el("tr", { className: name === chosen ? "followed" : "" }, el("th", { scope: "row" }, title), cell("a", a[name]), cell("b", b?.[name]), el("td", {}, b ? comparison(a[name], b[name]) : ""));
  });
  const head = el("tr", {}, ...["", titles.a, titles.b, "the second to the first"].map((title) => el("th", { scope: "col" }, title)));
  return el("div", { className: "scrolled", tabIndex: 0, role: "region", "aria-label": "Figures of both sides" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

/** Each request's time, on a scale that both sides share. */
function chartOf(side, title, lanes, endMs) {
  const canvas = el("canvas", { role: "img", "aria-label": `${title}: when each of ${lanes.length} requests waited, was prefilled and decoded` });
  const place = el("div", { className: "drawing" }, canvas);
  const draw = () => {
    if (place.clientWidth === 0) return;
    const { context, width } = sized(canvas, lanes.length * LANE + 14);
    const scale = width / Math.max(endMs, 1);
    lanes.forEach(({ segments }, i) => {
      for (const [label, start, took] of segments) {
        context.fillStyle = colour({ prefill: "part-prefill", decode: "part-decode", stalled: "alarm", transfer: "part-drafts" }[KINDS[label]] ?? "lane-queued");
        context.fillRect(Math.max(0, start) * scale, i * LANE + 1, Math.max(0.5, took * scale), LANE - 2);
      }
    });
    context.fillStyle = colour("quiet");
    context.font = "10px system-ui, sans-serif";
    context.fillText("0", 0, lanes.length * LANE + 11);
    context.fillText(`${(endMs / 1e3).toFixed(1)} s`, width - 34, lanes.length * LANE + 11);
  };
  new ResizeObserver(draw).observe(place);
  const legend = el("p", { className: "legend" }, ...[["queued", "waiting"], ["prefill", "prefill"], ["decode", "decode"], ["stalled", "stalled by others' prefill, or preempted"], ["transfer", "handed over"]].map(([kind, words]) => el("span", { className: `mark ${kind}` }, words)));
  return el("div", { className: "side", dataset: { side } }, el("h3", {}, `${side.toUpperCase()}: ${title}`), legend, place);
}

const settingsInWords = (given) => Object.entries(given).map(([name, value]) => `${name} ${value}`).join(", ") || "defaults";

function inFigures(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) || value >= 1000 ? whole(value) : value.toPrecision(value >= 100 ? 4 : 3);
}
