/** Results of both sides: figures, tokens and lanes. */
import { chooser, colour, el, sized } from "./dom.js";
import { LanePointer } from "./lane_pointer.js";
import { ms, whole } from "./words.js";

const FIGURES = [
  ["output_tokens_per_s", "tokens per second", true],
  ["tokens_per_s_a_process", "tokens per second, for each engine process", true],
  ["duration_s", "total time, s", false],
  ["ttft_p50_ms", "TTFT p50, ms", false],
  ["ttft_p99_ms", "TTFT p99, ms", false],
  ["tpot_p50_ms", "TPOT p50, ms", false],
  ["itl_p50_ms", "ITL p50, ms", false],
  ["itl_p99_ms", "ITL p99, ms", false],
  ["longest_gap_ms", "longest gap between two tokens, ms", false],
  ["e2e_p50_ms", "end to end p50, ms", false],
  ["most_running", "most sequences running at once", null],
  ["num_preemptions", "preemptions", null],
  ["cached_share", "prefix cache hits, share of prompt tokens", null],
  ["tokens_per_pass", "tokens per pass", null],
  ["rejected_share", "rejected drafts, share", null],
  ["kv_capacity_tokens", "KV capacity, tokens", null],
];
const LANE = 10;
const KINDS = { prefill: "prefill", recompute: "prefill", decode: "decode", stalled: "stalled", preempted: "stalled", transfer: "transfer" };

/**
 * Return the parts of the page that show the result of an experiment.
 * @param {object} now its status from the API
 * @param {object|undefined} story prepared experiment; undefined for one of the user's own
 * @returns {HTMLElement[]}
 */
export function sidesOf(now, story) {
  const { results, verdict, experiment } = now;
  if (!verdict) return [];
  const titles = { a: story?.a_title ?? settingsInWords(experiment.a), b: story?.b_title ?? settingsInWords(experiment.b) };
  const { a, b } = results;
  const endMs = Math.max(...[a, b].flatMap(({ lanes }) => lanes.flatMap(({ segments }) => segments.map(([, start, took]) => start + took))));
  const charts = ["a", "b"].map((side) => chartOf(side, titles[side], results[side], endMs));
  const runs = el("p", { className: "hint" }, `Both sides ran ${a.num_runs} times, alternately. Figures are medians, with their range over the runs. A ✓ marks a side if each of its runs is better than every run of the other side.`);
  return [verdictOf(verdict, story, titles, a.figures, b.figures), ...charts, runs, tableOf(titles, a.figures, b.figures, verdict.apart, story?.figure), ...withoutItl(a.figures, b.figures)];
}

function verdictOf({ tokens, apart, sentences }, story, titles, a, b) {
  const figure = story?.figure;
  const headline = story ? [el("p", { className: "headline" }, `${story.figure_title}: `, el("b", {}, inFigures(a[figure]?.median)), ` (${titles.a}), `, el("b", {}, inFigures(b[figure]?.median)), ` (${titles.b})${comparison(a[figure], b[figure], apart[figure])}`)] : [];
  const told = sentences.map(({ kind, text }) => el("p", { className: kind }, ...(kind === "price" ? [el("b", {}, "Cost. ")] : []), text));
  return el("div", { className: "verdict" }, ...headline, el("p", { className: "tokens" }, tokens), ...told);
}

/** Return the ratio of the second figure to the first in words, if the difference is more than chance. */
function comparison(a, b, apart) {
  if (!a || !b) return "";
  if (apart === 0) return a.median === b.median ? ": the same" : ": no clear difference, the ranges overlap";
  return a.median ? `: ${(b.median / a.median).toFixed(2)} times as much` : "";
}

function tableOf(titles, a, b, apart, chosen) {
  const rows = FIGURES.filter(([name]) => a[name] || b[name]).map(([name, title, isBetterHigh]) => {
    const better = isBetterHigh === null || apart[name] === 0 ? "" : apart[name] > 0 === isBetterHigh ? "b" : "a";
    const cell = (side, value) => el("td", { className: better === side ? "better" : "" }, inFigures(value?.median), el("span", { className: "range" }, rangeOf(value)), better === side ? el("span", { className: "visually-hidden" }, " (better)") : "");
    return el("tr", { className: name === chosen ? "followed" : "" }, el("th", { scope: "row" }, title), cell("a", a[name]), cell("b", b[name]), el("td", {}, comparison(a[name], b[name], apart[name]).replace(": ", "")));
  });
  const head = el("tr", {}, ...["", titles.a, titles.b, "second / first"].map((title) => el("th", { scope: "col" }, title)));
  return el("div", { className: "scrolled", tabIndex: 0, role: "region", "aria-label": "Figures of both sides" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

/** Explain a missing ITL. */
function withoutItl(a, b) {
  if (!a.rejected_share && !b.rejected_share) return [];
  return [el("p", { className: "hint" }, "A side with drafts has no ITL: a step gives several tokens at once, so most gaps would be 0. TPOT is the mean time per token.")];
}

const rangeOf = (value) => (!value || value.low === value.high ? "" : ` ${inFigures(value.low)}–${inFigures(value.high)}`);

/** Draw the lanes of one side, on a time scale that both sides share. */
function chartOf(side, title, { lanes, num_requests }, endMs) {
  const canvas = chooser(`${title}: when each request waited, was prefilled and decoded; arrow keys choose a piece`);
  const place = el("div", { className: "drawing" }, canvas);
  const drawn = `${lanes.length === num_requests ? `All ${num_requests}` : `${lanes.length} of ${num_requests}`} requests are drawn, from the run with the median time. Point at a piece, or use the arrow keys, to see the reason.`;
  const draw = () => {
    if (place.clientWidth === 0) return;
    const { context, width } = sized(canvas, lanes.length * LANE + 14);
    const scale = width / Math.max(endMs, 1);
    const pieces = lanes.map(({ id, segments, num_more }, i) => ({
      id,
      pieces: segments.map(([label, start, took, reason], k) => {
        const from = Math.max(0, start) * scale;
        const size = Math.max(0.5, took * scale);
        context.fillStyle = colour({ prefill: "part-prefill", decode: "part-decode", stalled: "alarm", transfer: "part-drafts" }[KINDS[label]] ?? "lane-queued");
        context.fillRect(from, i * LANE + 1, size, LANE - 2);
        const more = num_more > 0 && k === segments.length - 1 ? ` ${num_more} later pieces are not drawn.` : "";
        return { from, to: from + size, words: `${label}, ${ms(took)}, starting at ${ms(start)}: ${reason}.${more}` };
      }),
    }));
    context.fillStyle = colour("quiet");
    context.font = "10px system-ui, sans-serif";
    context.fillText("0", 0, lanes.length * LANE + 11);
    context.fillText(`${(endMs / 1e3).toFixed(1)} s`, width - 34, lanes.length * LANE + 11);
    pointer.drawn(context, pieces, drawn);
  };
  const pointer = new LanePointer(canvas, LANE, draw);
  new ResizeObserver(draw).observe(place);
  const legend = el("p", { className: "legend" }, ...[["queued", "waiting"], ["prefill", "prefill"], ["decode", "decode"], ["stalled", "delayed by prefill of other requests, or preempted"], ["transfer", "KV transfer"]].map(([kind, words]) => el("span", { className: `mark ${kind}` }, words)));
  return el("div", { className: "side", dataset: { side } }, el("h3", {}, `${side.toUpperCase()}: ${title}`), legend, place, pointer.line);
}

const settingsInWords = (given) => Object.entries(given).map(([name, value]) => `${name} ${value}`).join(", ") || "defaults";

function inFigures(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) || value >= 1000 ? whole(value) : value.toPrecision(value >= 100 ? 4 : 3);
}
