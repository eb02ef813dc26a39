// The catalog: every slice type with its topology and its prices by place.

import { html, useState } from "../vendor/preact-htm.js";
import { useApi } from "../state.js";
import { Card, Loaded, Table, useTitle } from "../parts/elements.js";
import { Torus } from "../parts/torus.js";
import { ago, count, dollars, number } from "../format.js";

// Pure: how attempts of a type went in a place, in words that fit a cell.
export function chance(places, type, place) {
  const good = places.filter((one) => one.type === type && (!place || one.place === place)).reduce((sum, one) => sum + one.good, 0);
  const bad = places.filter((one) => one.type === type && (!place || one.place === place)).reduce((sum, one) => sum + one.bad, 0);
  if (good + bad < 0.05) return null;
  return (good + 1) / (good + bad + 2);
}

const USUAL = 16; // chips of the slice that is shown first
const SOME = 8; // prices shown at first

export function Slices() {
  useTitle("Slices");
  const all = useApi("/v1/slices");
  const learned = useApi("/v1/availability");
  const places = learned.value ? learned.value.places : [];
  const [generation, setGeneration] = useState("v6e");
  const [open, setOpen] = useState(null);
  const [every, setEvery] = useState(false);
  return html`<${Loaded} from=${all}>${(value) => {
    const generations = [...new Set(value.slices.map((one) => one.generation))];
    const rows = value.slices.filter((one) => one.generation === generation).map((one) => ({ ...one, key: `${one.type} ${one.topology} ${one.hosts}` }));
    const chosen = rows.find((one) => one.key === open) || rows.find((one) => one.chips === USUAL) || rows[0];
    const priced = chosen.prices.filter((one) => one.on_demand !== null || one.spot !== null);
    const shownPrices = every ? priced : priced.slice(0, SOME);
    return html`
      <div class="heading"><h1>Slices</h1><div class="tabs" role="group" aria-label="Generations">${generations.map((name) => html`
        <button key=${name} aria-pressed=${String(name === generation)} onClick=${() => { setGeneration(name); setOpen(null); }}>${name}</button>`)}</div></div>
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
          { title: "Availability", cell: (one) => html`<${Chance} value=${chance(places, one.type)} />`, minor: true },
        ]} /></${Card}>
        <${Card} title=${`${chosen.type} (${chosen.topology})`}>
          <${Torus} topology=${chosen.topology} hosts=${chosen.hosts} perHost=${Math.max(1, chosen.chips / chosen.hosts)} />
          <p class="muted">${count(chosen.chips, "chip")} on ${count(chosen.hosts, "host")}${chosen.hosts > 1 ? "; each host has its colour" : ""}.</p>
          <h3>Availability, from attempts</h3>
          ${places.some((one) => one.type === chosen.type) ? html`<${Table} caption="Availability" rows=${places.filter((one) => one.type === chosen.type).map((one) => ({ ...one, key: `${one.provider} ${one.place} ${one.spot}` }))} columns=${[
            { title: "Place", cell: (one) => `${[one.provider, one.place].filter(Boolean).join("/")}${one.spot ? " spot" : ""}` },
            { title: "Availability", cell: (one) => html`<${Chance} value=${(one.good + 1) / (one.good + one.bad + 2)} />` },
            { title: "Last try", cell: (one) => ago(one.at), numeric: true },
          ]} />` : html`<p class="muted">This server has not tried to get one yet. Each attempt teaches it where capacity is; recent ones count more.</p>`}
          <h3>Prices by place</h3>
          ${priced.length ? html`<${Table} caption="Prices by place" rows=${shownPrices.map((one) => ({ ...one, key: one.place }))} columns=${[
            { title: "Place", cell: (one) => one.place },
            { title: "$/h", cell: (one) => dollars(one.on_demand), numeric: true },
            { title: "Spot $/h", cell: (one) => dollars(one.spot), numeric: true },
          ]} />` : html`<p class="muted">No price is published.</p>`}
          ${priced.length > SOME ? html`<button class="quiet" onClick=${() => setEvery(!every)}>${every ? "Only the cheapest" : `All ${priced.length} places`}</button>` : null}
        </${Card}>
      </div>`;
  }}</${Loaded}>`;
}

const Chance = ({ value }) => (value === null ? html`<span class="muted">–</span>` : html`<span class="chance" title=${`${Math.round(100 * value)} % by recent attempts`}><meter min="0" max="1" low="0.4" high="0.7" optimum="1" value=${value} aria-label=${`${Math.round(100 * value)} %`}></meter> ${Math.round(100 * value)} %</span>`);
