// The catalog: every slice type with its topology and its prices by place.

import { html, useState } from "../vendor/preact-htm.js";
import { useApi } from "../state.js";
import { Card, Loaded, Table, useTitle } from "../parts/elements.js";
import { Torus } from "../parts/torus.js";
import { count, dollars, number } from "../format.js";

export function Slices() {
  useTitle("Slices");
  const all = useApi("/v1/slices");
  const [generation, setGeneration] = useState("v6e");
  const [open, setOpen] = useState(null);
  return html`<${Loaded} from=${all}>${(value) => {
    const generations = [...new Set(value.slices.map((one) => one.generation))];
    const rows = value.slices.filter((one) => one.generation === generation).map((one) => ({ ...one, key: `${one.type} ${one.topology} ${one.hosts}` }));
    const chosen = rows.find((one) => one.key === open) || rows[0];
    return html`
      <div class="tabs" role="tablist" aria-label="Generations">${generations.map((name) => html`
        <button role="tab" aria-selected=${String(name === generation)} onClick=${() => { setGeneration(name); setOpen(null); }}>${name}</button>`)}</div>
      <div class="columns wide-left">
        <${Card} title=${`${generation} slices`}><${Table} caption=${`${generation} slices`} rows=${rows} onOpen=${(one) => setOpen(one.key)} columns=${[
          { title: "Type", cell: (one) => html`<button class="link" aria-pressed=${String(chosen.key === one.key)} onClick=${() => setOpen(one.key)}>${one.type}</button>` },
          { title: "Topology", cell: (one) => one.topology },
          { title: "Chips", cell: (one) => number(one.chips), numeric: true },
          { title: "Hosts", cell: (one) => number(one.hosts), numeric: true, minor: true },
          { title: "HBM GiB", cell: (one) => number(one.hbm_gib), numeric: true, minor: true },
          { title: "TFLOP/s", cell: (one) => number(one.peak_tflops), numeric: true, minor: true },
          { title: "$/h", cell: (one) => dollars(one.on_demand), numeric: true },
          { title: "Spot $/h", cell: (one) => dollars(one.spot), numeric: true },
        ]} /></${Card}>
        <${Card} title=${`${chosen.type} (${chosen.topology})`}>
          <${Torus} topology=${chosen.topology} hosts=${chosen.hosts} perHost=${Math.max(1, chosen.chips / chosen.hosts)} />
          <p class="muted">${count(chosen.chips, "chip")} on ${count(chosen.hosts, "host")}${chosen.hosts > 1 ? "; each host has its colour" : ""}.</p>
          ${chosen.prices.length ? html`<${Table} caption="Prices by place" rows=${chosen.prices.map((one) => ({ ...one, key: one.place }))} columns=${[
            { title: "Place", cell: (one) => one.place },
            { title: "$/h", cell: (one) => dollars(one.on_demand), numeric: true },
            { title: "Spot $/h", cell: (one) => dollars(one.spot), numeric: true },
          ]} />` : html`<p class="muted">No price is published.</p>`}
        </${Card}>
      </div>`;
  }}</${Loaded}>`;
}
