// The log of a job: lines as the server renders them, a million of them without slowing.
//
// Lines are kept in an array and only those on the screen are elements; each is text and nothing else, so that whatever a job prints
// (markup, terminal escapes) is shown and never obeyed. Arriving lines are drawn once a frame.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { lines as readLines } from "../api.js";

const LINE = 18; // pixels, as in style.css
const MARGIN = 20; // lines above and below the screen
const MOST = 1_000_000; // the oldest go beyond that
const SPARE = 50_000; // dropped at once: cutting the front of a long array is slow

// Colours and cursor movements of terminals are left out; other control characters are shown as what they are.
const ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\-_])/g;
export const plain = (text) => text.replace(ESCAPES, "").replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g, "\ufffd");

const MOST_FOUND = 100_000;

// Pure but for `seen`, what was found so far: only lines that came since are looked at, however often it is asked.
export function findLines(seen, log, needle) {
  if (seen.needle !== needle || seen.log !== log || seen.dropped !== log.dropped) Object.assign(seen, { needle, log, dropped: log.dropped, next: 0, places: [] });
  for (; seen.next < log.lines.length && seen.places.length < MOST_FOUND; seen.next++) if (log.lines[seen.next].toLowerCase().includes(needle)) seen.places.push(seen.next);
  return seen.places;
}

export function LogView({ cluster, job, hosts }) {
  const [rank, setRank] = useState("");
  const [raw, setRaw] = useState(false);
  const [search, setSearch] = useState("");
  const [follow, setFollow] = useState(true);
  const [, draw] = useState(0);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(400);
  const [state, setState] = useState("loading");
  const kept = useRef({ lines: [], dropped: 0 });
  const box = useRef(null);

  useEffect(() => {
    const stop = new AbortController();
    let frame = 0;
    kept.current = { lines: [], dropped: 0 };
    let cursor = "";
    const drawSoon = () => {
      if (!frame)
        frame = requestAnimationFrame(() => {
          frame = 0;
          draw((count) => count + 1);
        });
    };
    const onLine = (entry) => {
      if (entry.kind === "log") {
        for (const line of entry.text.replace(/\n$/, "").split("\n")) kept.current.lines.push(plain(line));
        const over = kept.current.lines.length - MOST;
        if (over > SPARE) {
          kept.current.lines.splice(0, over);
          kept.current.dropped += over;
        }
        cursor = entry.cursor || cursor;
        setState("live");
        drawSoon();
      } else if (entry.kind === "end") setState("ended");
    };
    (async () => {
      let wait = 500;
      while (!stop.signal.aborted) {
        const query = new URLSearchParams({ raw: String(raw) });
        if (rank !== "") query.set("rank", rank);
        if (cursor) query.set("cursor", cursor);
        let ended = false;
        try {
          await readLines(`/v1/clusters/${encodeURIComponent(cluster)}/jobs/${job}/watch?${query}`, stop.signal, (entry) => {
            ended = ended || entry.kind === "end";
            onLine(entry);
            wait = 500;
          });
        } catch (error) {
          if (stop.signal.aborted) return;
          if (error.status >= 400 && error.status < 500) return setState("none");
        }
        if (ended) return;
        setState("away");
        await new Promise((resolve) => setTimeout(resolve, wait));
        wait = Math.min(wait * 2, 10000);
      }
    })();
    return () => {
      stop.abort();
      cancelAnimationFrame(frame);
    };
  }, [cluster, job, rank, raw]);

  const count = kept.current.lines.length;
  const looked = useRef({});
  const found = search ? findLines(looked.current, kept.current, search.toLowerCase()) : null;
  const shown = found ? found.length : count;

  useEffect(() => {
    const element = box.current;
    const measure = new ResizeObserver(() => setHeight(element.clientHeight));
    measure.observe(element);
    return () => measure.disconnect();
  }, []);
  useEffect(() => {
    if (follow && !found && box.current) box.current.scrollTop = box.current.scrollHeight;
  });

  // A browser's largest element is some 17 million pixels high: beyond that, one pixel stands for more than one line.
  const full = shown * LINE;
  const drawn = Math.min(full, 12_000_000);
  const first = Math.max(0, Math.floor(((full - height) * Math.min(1, top / Math.max(1, drawn - height))) / LINE) - MARGIN);
  const last = Math.min(shown, first + Math.ceil(height / LINE) + 2 * MARGIN);
  const offset = Math.max(0, Math.min(drawn - (last - first) * LINE, top - MARGIN * LINE));
  const at = full === drawn ? first * LINE : first === 0 ? 0 : last === shown ? drawn - (last - first) * LINE : offset;
  const scrolled = (event) => {
    const element = event.currentTarget;
    setTop(element.scrollTop);
    setFollow(element.scrollTop + element.clientHeight >= element.scrollHeight - 2 * LINE);
  };
  const rows = [];
  for (let i = first; i < last; i++) {
    const index = found ? found[i] : i;
    rows.push(html`<div class="line" key=${index}><span class="at">${index + 1 + kept.current.dropped}</span>${kept.current.lines[index]}</div>`);
  }
  const note = { loading: "Waiting for output…", live: "", ended: "", away: "The server is away; trying again…", none: "There is no output." }[state];
  return html`<div class="logs">
    <div class="bar-of-tools" role="toolbar" aria-label="Log">
      <label>Rank <select value=${rank} onChange=${(event) => setRank(event.target.value)}>
        <option value="">all</option>${Array.from({ length: hosts }, (_, i) => html`<option value=${String(i)}>${i}</option>`)}</select></label>
      <label class="check"><input type="checkbox" checked=${!raw} onChange=${(event) => setRaw(!event.target.checked)} /> Lines alike once</label>
      <label class="grow"><span class="visually-hidden">Search the log</span>
        <input type="search" placeholder="Search" value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>
      <span class="muted tabular">${found ? `${shown.toLocaleString("en-US")} of ` : ""}${count.toLocaleString("en-US")} lines</span>
      <label class="check"><input type="checkbox" checked=${follow} onChange=${(event) => setFollow(event.target.checked)} /> Follow</label>
    </div>
    <div class="log" ref=${box} onScroll=${scrolled} tabindex="0" role="log" aria-label="Output of the job" aria-live="off">
      <div class="all" ref=${(element) => element && (element.style.height = `${drawn}px`)}>
        <div class="window" ref=${(element) => element && (element.style.transform = `translateY(${at}px)`)}>${rows}</div>
      </div>
      ${note && !count ? html`<p class="muted note">${note}</p>` : null}
    </div>
    ${note && count ? html`<p class="muted" role="status">${note}</p>` : null}
  </div>`;
}
