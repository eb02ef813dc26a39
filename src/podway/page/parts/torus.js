// A slice drawn as its chips: planes of the torus side by side. Chips of one colour are of one host (neighbours: 2x2 or 2x4), or, with
// `box`, of one group of a mesh axis: the chips along x, y and z that exchange data over it.

import { html } from "../vendor/preact-htm.js";

const MOST = 4096;
const BLOCKS = { 1: [1, 1], 2: [1, 2], 4: [2, 2], 8: [2, 4] };

export function Torus({ topology, hosts = 0, perHost = 4, box, label }) {
  const [x, y = 1, z = 1] = topology.split("x").map(Number);
  if (!x || x * y * z > MOST) return html`<p class="muted">${topology}</p>`;
  const across = Math.min(z, 8);
  const size = Math.max(4, Math.min(18, Math.floor(420 / (x * across))));
  const gap = Math.max(1, Math.round(size / 6));
  const down = Math.ceil(z / across);
  const width = across * (x * (size + gap) + size) - size;
  const height = down * (y * (size + gap) + size) - size;
  const [wide, high] = BLOCKS[perHost] || [1, perHost];
  const [bx, by = 1, bz = 1] = box || [wide, high, 1];
  const inRow = Math.ceil(x / bx);
  // One more colour along each row and plane, so that neighbours differ.
  const groupOf = (i, j, k) => (Math.floor(k / bz) * Math.ceil(y / by) + Math.floor(j / by)) * (inRow + 1) + Math.floor(i / bx) + Math.floor(k / bz);
  const chips = [];
  for (let k = 0; k < z; k++)
    for (let j = 0; j < y; j++)
      for (let i = 0; i < x; i++)
        chips.push(html`<rect class=${`chip tone${box || hosts > 1 ? groupOf(i, j, k) % 6 : 0}`} x=${(k % across) * (x * (size + gap) + size) + i * (size + gap)}
          y=${Math.floor(k / across) * (y * (size + gap) + size) + j * (size + gap)} width=${size} height=${size} rx=${size / 5} />`);
  return html`<svg class="torus" viewBox="0 0 ${width} ${height}" width=${width} height=${height} role="img"
    aria-label=${label || `A ${topology} torus of ${x * y * z} chips`}>${chips}</svg>`;
}
