// A slice drawn as its chips: planes of the torus side by side, coloured by host. The chips of a host are neighbours: 2x2 or 2x4.

import { html } from "../vendor/preact-htm.js";

const MOST = 4096;
const BLOCKS = { 1: [1, 1], 2: [1, 2], 4: [2, 2], 8: [2, 4] };

export function Torus({ topology, hosts = 0, perHost = 4, small = false, label }) {
  const [x, y, z = 1] = topology.split("x").map(Number);
  if (!x || !y || x * y * z > MOST) return html`<p class="muted">${topology}</p>`;
  const size = small ? 6 : Math.max(6, Math.min(18, Math.floor(420 / (x * Math.min(z, 8)))));
  const gap = Math.max(1, Math.round(size / 6));
  const across = Math.min(z, 8);
  const down = Math.ceil(z / across);
  const width = across * (x * (size + gap) + size) - size;
  const height = down * (y * (size + gap) + size) - size;
  const [wide, high] = BLOCKS[perHost] || [1, perHost];
  const inRow = Math.ceil(x / wide);
  // One more colour along each row and plane, so that neighbours differ.
  const hostOf = (i, j, k) => (k * Math.ceil(y / high) + Math.floor(j / high)) * (inRow + 1) + Math.floor(i / wide) + k;
  const chips = [];
  for (let k = 0; k < z; k++)
    for (let j = 0; j < y; j++)
      for (let i = 0; i < x; i++) {
        const host = hostOf(i, j, k);
        chips.push(html`<rect class=${`chip tone${hosts > 1 ? host % 6 : 0}`} x=${(k % across) * (x * (size + gap) + size) + i * (size + gap)}
          y=${Math.floor(k / across) * (y * (size + gap) + size) + j * (size + gap)} width=${size} height=${size} rx=${size / 5} />`);
      }
  return html`<svg class="torus" viewBox="0 0 ${width} ${height}" width=${width} height=${height} role="img"
    aria-label=${label || `A ${topology} torus of ${x * y * z} chips`}>${chips}</svg>`;
}
