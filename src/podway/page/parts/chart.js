// uPlot in a box that follows its width and the colours of the page.

import { html, useEffect, useRef } from "../vendor/preact-htm.js";
import uPlot from "../vendor/uplot.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// `make(colour)` gives uPlot's options without width and height.
export function Chart({ make, data, height = 260, label }) {
  const box = useRef(null);
  useEffect(() => {
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    const options = make(colour, axis);
    const plot = new uPlot({ ...options, width: box.current.clientWidth || 600, height }, data, box.current);
    const follow = new ResizeObserver(() => plot.setSize({ width: box.current.clientWidth || 600, height }));
    follow.observe(box.current);
    return () => {
      follow.disconnect();
      plot.destroy();
    };
  }, [data]);
  return html`<div class="chart" ref=${box} role="img" aria-label=${label}></div>`;
}
