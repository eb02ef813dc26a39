// Who may use this server, the clouds it knows, and the way out.

import { html, useState } from "../vendor/preact-htm.js";
import { request } from "../api.js";
import { refresh, useApi } from "../state.js";
import { Action, Card, Code, Empty, Loaded, Problem, Table, useTitle } from "../parts/elements.js";
import { ago, clock } from "../format.js";

export function Settings({ session }) {
  useTitle("Settings");
  const admin = session.role === "admin";
  const logOut = async () => {
    await request("DELETE", "/v1/session");
    location.assign("/page/ended");
  };
  return html`<div class="heading"><h1>Settings</h1></div>
    <div class="columns">
      <${Card} title="You"><dl class="facts"><dt>Name</dt><dd>${session.user}</dd><dt>Role</dt><dd>${session.role}</dd><dt>Server</dt><dd>Podway ${session.version}</dd></dl>
        <div class="buttons"><${Action} label="Log out" question="End this session? podway ui opens another one." act=${logOut} /></div></${Card}>
      <${Clouds} />
    </div>
    <${Tokens} session=${session} admin=${admin} />
    <${Members} admin=${admin} />
    ${admin ? html`<${Audit} />` : null}`;
}

function Clouds() {
  const clouds = useApi("/v1/clouds");
  return html`<${Card} title="Clouds"><${Loaded} from=${clouds}>${(value) => html`<${Table} caption="Clouds" rows=${value.clouds.map((one) => ({ ...one, key: one.name }))} columns=${[
    { title: "Name", cell: (one) => one.name },
    { title: "State", cell: (one) => html`<span class=${`state ${one.note && one.configured ? "bad" : one.configured ? "good" : "idle"}`}>${one.simulated ? "simulated" : one.note && one.configured ? "unreachable" : one.configured ? "set up" : "not set up"}</span>` },
    { title: "Used", cell: (one) => (one.used ? "yes" : "never"), minor: true },
    { title: "", cell: (one) => html`<span class="muted">${one.note}</span>` },
  ]} />`}</${Loaded}></${Card}>`;
}

function Tokens({ session, admin }) {
  const tokens = useApi("/v1/tokens");
  const revoke = (one) => async () => {
    await request("DELETE", `/v1/tokens/${one.id}`);
    refresh((path) => path.startsWith("/v1/tokens"));
  };
  return html`<${Card} title=${admin ? "Tokens of everybody" : "Your tokens"}><${Loaded} from=${tokens}>${(value) => html`
    ${value.tokens.length ? html`<${Table} caption="Tokens" rows=${value.tokens.map((one) => ({ ...one, key: one.id }))} columns=${[
      { title: "Person", cell: (one) => one.user }, { title: "Name", cell: (one) => one.name || "–", minor: true }, { title: "Role", cell: (one) => one.role },
      { title: "Created", cell: (one) => clock(one.created), minor: true }, { title: "Expires", cell: (one) => (one.expires ? clock(one.expires) : "never") },
      { title: "", cell: (one) => (session.role === "viewer" ? null : html`<${Action} label="Revoke" danger=${true} question=${`Revoke this token of ${one.user}? Whoever uses it is logged out at once.`} act=${revoke(one)} />`), numeric: true }]} />`
      : html`<${Empty} title="No tokens yet"><p>This server is yours alone. A token lets a colleague in.</p></${Empty}>`}
    ${admin ? html`<${NewToken} />` : null}`}</${Loaded}></${Card}>`;
}

function NewToken() {
  const [user, setUser] = useState("");
  const [role, setRole] = useState("member");
  const [made, setMade] = useState(null);
  const [error, setError] = useState(null);
  const make = async (event) => {
    event.preventDefault();
    setError(null);
    setMade(null);
    try {
      setMade(await request("POST", "/v1/tokens", { user, role }));
      setUser("");
      refresh((path) => path.startsWith("/v1/tokens"));
    } catch (problem) {
      setError(problem);
    }
  };
  return html`<form class="inline-form" onSubmit=${make}><label>A token for <input name="user" value=${user} required placeholder="name" onInput=${(event) => setUser(event.target.value)} /></label>
      <label>as <select value=${role} onChange=${(event) => setRole(event.target.value)}><option value="member">member</option><option value="viewer">viewer</option><option value="admin">admin</option></select></label>
      <button>Make it</button></form>
    <${Problem} error=${error} />
    ${made ? html`<p class="muted">Shown once: send it to ${made.user || "them"} by a safe way. They run <code>podway login</code> with it.</p><${Code}>${made.token}</${Code}>` : null}`;
}

function Members({ admin }) {
  const members = useApi("/v1/members");
  return html`<${Card} title="Projects"><${Loaded} from=${members}>${(value) => (value.members.length ? html`<${Table} caption="Members of projects" rows=${value.members.map((one) => ({ ...one, key: `${one.project} ${one.user}` }))} columns=${[
    { title: "Project", cell: (one) => one.project }, { title: "Person", cell: (one) => one.user }, { title: "Role", cell: (one) => one.role }]} />`
    : html`<p class="muted">There are no projects.${admin ? " Members of a project manage its clusters together:" : ""}</p>${admin ? html`<${Code}>podway server member PROJECT NAME</${Code}>` : null}`)}</${Loaded}></${Card}>`;
}

function Audit() {
  const entries = useApi("/v1/audit?limit=50");
  return html`<${Card} title="Who did what"><${Loaded} from=${entries}>${(value) => (value.entries.length ? html`<${Table} caption="Audit log" rows=${value.entries.map((one, key) => ({ ...one, key }))} columns=${[
    { title: "When", cell: (one) => html`<span title=${clock(one.time)}>${ago(one.time)}</span>` }, { title: "Person", cell: (one) => one.user }, { title: "Did", cell: (one) => one.action },
    { title: "To", cell: (one) => one.target, minor: true }, { title: "From", cell: (one) => one.address, minor: true }, { title: "Answer", cell: (one) => one.status, numeric: true }]} />`
    : html`<p class="muted">Nothing yet.</p>`)}</${Loaded}></${Card}>`;
}
