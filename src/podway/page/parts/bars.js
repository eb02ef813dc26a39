// Parts of a whole as one bar with a legend.

import { html } from "../vendor/preact-htm.js";

export function Bar({ parts, limit, format, label }) {
  const shown = Object.entries(parts).filter(([, value]) => value > 0);
  const total = shown.reduce((sum, [, value]) => sum + value, 0);
  const scale = Math.max(limit || 0, total) || 1;
  let at = 0;
  return html`<figure class="bar">
    <svg viewBox="0 0 1000 22" preserveAspectRatio="none" role="img" aria-label=${`${label}: ${shown.map(([name, value]) => `${name} ${format(value)}`).join(", ")}`}>
      <rect class="track" x="0" y="0" width="1000" height="22" />
      ${shown.map(([, value], index) => {
        const width = (1000 * value) / scale;
        const part = html`<rect class=${`part tone${index % 8}`} x=${at} y="0" width=${Math.max(0, width - 2)} height="22" />`;
        at += width;
        return part;
      })}
      ${limit ? html`<rect class="limit" x=${Math.min(997, (1000 * limit) / scale)} y="0" width="3" height="22" />` : null}
    </svg>
    <figcaption>${shown.map(([name, value], index) => html`<span><i class=${`dot tone${index % 8}`}></i>${name} <b>${format(value)}</b></span>`)}
      ${limit ? html`<span class="muted">limit ${format(limit)}</span>` : null}</figcaption>
  </figure>`;
}
