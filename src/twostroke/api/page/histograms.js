/** Histograms of TTFT, TPOT and ITL, with percentiles and the latency limit. */
import { colour, el, panel, setText, sized } from "./dom.js";
import { ms, percent, whole } from "./words.js";

const HEIGHT = 110;
const KINDS = [
  ["ttft", "TTFT", "time to first token"],
  ["tpot", "TPOT", "time per output token, of requests that have ended"],
  ["itl", "ITL", "inter-token latency"],
];

/** Return the sum of several engines' histograms, which have the same bounds. */
export function added(histograms) {
  if (histograms.length === 0) return { bounds: [], counts: [], count: 0, sum: 0 };
  const counts = histograms[0].counts.map((_, i) => histograms.reduce((sum, { counts }) => sum + counts[i], 0));
  return { bounds: histograms[0].bounds, counts, count: counts.reduce((a, b) => a + b, 0), sum: histograms.reduce((sum, histogram) => sum + histogram.sum, 0) };
}

/**
 * Return a percentile, interpolated linearly within its bucket as in Prometheus' histogram_quantile.
 * @param {{bounds: number[], counts: number[], count: number}} histogram
 * @param {number} share from 0 to 1
 * @returns {number|null} in the unit of the bounds; Infinity beyond the last bound, null without values
 */
export function quantile({ bounds, counts, count }, share) {
  if (count === 0) return null;
  let left = share * count;
  for (let i = 0; i < bounds.length; i += 1) {
    if (left <= counts[i] && counts[i] > 0) {
      const low = i === 0 ? 0 : bounds[i - 1];
      return low + (bounds[i] - low) * (left / counts[i]);
    }
    left -= counts[i];
  }
  return Infinity;
}

/** Return the share of values within a limit, interpolated linearly within the limit's bucket. */
export function shareWithin({ bounds, counts, count }, limit) {
  if (count === 0) return null;
  let within = 0;
  for (let i = 0; i < counts.length; i += 1) {
    const low = i === 0 ? 0 : bounds[i - 1];
    const high = bounds[i] ?? Infinity;
    if (limit >= high) within += counts[i];
    else if (limit > low && Number.isFinite(high)) within += (counts[i] * (limit - low)) / (high - low);
  }
  return within / count;
}

export class Histograms {
  #charts = {};
  #last = null;

  constructor() {
    const charts = KINDS.map(([kind, title, help]) => {
      const limit = el("input", { type: "number", min: "0", step: "any", id: `limit-${kind}`, placeholder: "none" });
      const chart = { canvas: el("canvas", { role: "img" }), told: el("p", { className: "hint", id: `told-${kind}` }), limit };
      this.#charts[kind] = chart;
      limit.addEventListener("input", () => this.#last && this.show(this.#last));
      return el("div", { className: "histogram" }, el("h3", {}, el("abbr", { title: help }, title)), el("div", { className: "drawing" }, chart.canvas), chart.told, el("label", { className: "inline", htmlFor: limit.id }, "Limit, ms ", limit));
    });
    this.element = panel("histograms", "Latencies since the start, ms", el("div", { className: "histograms" }, ...charts));
  }

  /** @param {LiveModel} model */
  show(model) {
    this.#last = model;
    for (const [kind] of KINDS) {
      const histogram = added([...model.engines.values()].map((engine) => engine.histograms[kind]));
      const chart = this.#charts[kind];
      const told = model.slo[{ ttft: "ttft_s", itl: "itl_s" }[kind]] ?? null;
      const limitS = chart.limit.value === "" ? told : Number(chart.limit.value) / 1e3;
      chart.limit.placeholder = told === null ? "none" : String(told * 1e3);
      draw(chart.canvas, histogram, limitS);
      const [p50, p90, p99] = [0.5, 0.9, 0.99].map((share) => quantile(histogram, share));
      const within = limitS === null ? "" : `; ${percent(shareWithin(histogram, limitS) ?? 0)} within ${ms(limitS * 1e3)}`;
      const words = histogram.count === 0 ? "No values yet." : `p50 ${inMs(p50)}, p90 ${inMs(p90)}, p99 ${inMs(p99)}; ${whole(histogram.count)} values${within}`;
      setText(chart.told, words);
      chart.canvas.setAttribute("aria-label", words);
    }
  }
}

const inMs = (s) => ms(s === null ? null : s * 1e3);

function draw(canvas, { bounds, counts }, limitS) {
  const { context, width } = sized(canvas, HEIGHT);
  const used = counts.map((count, i) => (count > 0 ? i : -1)).filter((i) => i >= 0);
  if (used.length === 0) return;
  const first = Math.max(0, used[0] - 1);
  const last = Math.min(counts.length - 1, used.at(-1) + 1);
  const bar = (width - 2) / (last - first + 1);
  const most = Math.max(...counts);
  const height = HEIGHT - 16;
  context.font = "10px system-ui, sans-serif";
  for (let i = first; i <= last; i += 1) {
    const size = (counts[i] / most) * (height - 4);
    context.fillStyle = colour("part-decode");
    context.fillRect(1 + (i - first) * bar, height - size, Math.max(1, bar - 2), size);
    context.fillStyle = colour("quiet");
    const label = i < bounds.length ? `${+(bounds[i] * 1e3).toPrecision(3)}` : "∞";
    const labelWidth = context.measureText(label).width;
    const left = (i - first + 1) * bar - labelWidth / 2 - 4;
    if ((bar > 26 || (i - first) % 2 === 1) && left + labelWidth < width) context.fillText(label, left, HEIGHT - 4);
  }
  if (limitS === null) return;
  const place = bounds.findIndex((bound) => bound >= limitS);
  const low = place <= 0 ? 0 : bounds[place - 1];
  const x = place < 0 ? width - 2 : 1 + (place - first + (limitS - low) / (bounds[place] - low)) * bar;
  context.strokeStyle = colour("alarm");
  context.beginPath();
  context.moveTo(x, 0);
  context.lineTo(x, height);
  context.stroke();
}
