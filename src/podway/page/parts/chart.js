// uPlot in a box that follows its width and the colours of the page. New data is drawn into the same plot: nothing flickers.

import { html, useEffect, useRef } from "../vendor/preact-htm.js";
import uPlot from "../vendor/uplot.js";

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const barPaths = uPlot.paths.bars({ size: [0.6, 36] });

// `make(colour, axis)` gives uPlot's options without width and height; `shape` names what they depend on.
export function Chart({ make, data, height = 260, label, shape = "" }) {
  const box = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const build = () => {
      if (plot.current) plot.current.destroy();
      const font = "12px system-ui, sans-serif";
      const axis = { stroke: colour("--muted"), font, labelFont: font, grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1, size: 4 } };
      plot.current = new uPlot({ ...make(colour, axis), width: box.current.clientWidth || 600, height }, data, box.current);
    };
    build();
    const follow = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth || 600, height }));
    follow.observe(box.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", build);
    return () => {
      follow.disconnect();
      dark.removeEventListener("change", build);
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    if (plot.current) plot.current.setData(data);
  }, [data]);
  return html`<div class="chart" ref=${(element) => hold(box, element, height)} role="img" aria-label=${label}></div>`;
}

// Room for the plot before it is drawn: nothing moves when it comes.
function hold(box, element, height) {
  box.current = element;
  if (element) element.style.minHeight = `${height}px`;
}

const compact = (value) =>
  value === 0 ? "0" : Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3 ? value.toExponential(0).replace("+", "") : String(Number(value.toPrecision(3)));

// Lines of several runs over their steps. `lines`: [{name, tone, x, y}]; `level`: {name, value} is a dashed line across.
export function Lines({ lines, level, label, height = 200, log = false }) {
  const tables = lines.map((one) => [one.x, one.y]);
  const joined = tables.length ? uPlot.join(tables) : [[], []];
  const data = level ? [...joined, joined[0].map(() => level.value)] : joined;
  const make = (colour, axis) => ({
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => padded(low, high) } },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : compact(tick))) }],
    series: [
      { label: "step" },
      ...lines.map((one) => ({ label: one.name, stroke: colour(`--t${one.tone % 8}`), width: 1.6, spanGaps: true, points: { show: one.x.length < 3 } })),
      ...(level ? [{ label: level.name, stroke: colour("--muted"), width: 1.2, dash: [6, 5], points: { show: false } }] : []),
    ],
    legend: { show: false },
    cursor: { drag: { x: true, y: false }, points: { size: 6 }, sync: { key: "training" } },
  });
  const shape = `${lines.map((one) => `${one.name}:${one.tone}`).join()}|${level ? level.name : ""}|${log}`;
  return html`<${Chart} make=${make} data=${data} height=${height} label=${label} shape=${shape} />`;
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
