// Who may use this server, and the way out.

import { html } from "../vendor/preact-htm.js";
import { request } from "../api.js";
import { useApi } from "../state.js";
import { Action, Card, Code, Loaded, Table, useTitle } from "../parts/elements.js";
import { clock } from "../format.js";

export function Settings({ session }) {
  useTitle("Settings");
  const tokens = useApi("/v1/tokens");
  const logOut = async () => {
    await request("DELETE", "/v1/session");
    location.assign("/page/ended");
  };
  return html`
    <${Card} title="You"><dl class="facts"><dt>Name</dt><dd>${session.user}</dd><dt>Role</dt><dd>${session.role}</dd><dt>Server</dt><dd>Podway ${session.version}</dd></dl>
      <div class="buttons"><${Action} label="Log out" question="End this session? podway ui opens another one." act=${logOut} /></div></${Card}>
    <${Card} title=${session.role === "admin" ? "Tokens of everybody" : "Your tokens"}><${Loaded} from=${tokens}>${(value) => html`
      ${value.tokens.length ? html`<${Table} caption="Tokens" rows=${value.tokens.map((one) => ({ ...one, key: one.id }))} columns=${[
        { title: "Person", cell: (one) => one.user }, { title: "Name", cell: (one) => one.name || "–" }, { title: "Role", cell: (one) => one.role },
        { title: "Created", cell: (one) => clock(one.created), minor: true }, { title: "Expires", cell: (one) => (one.expires ? clock(one.expires) : "never") }]} />`
        : html`<p class="muted">There are no tokens.</p>`}
      ${session.role === "admin" ? html`<p class="muted">A token for a colleague:</p><${Code}>podway server token NAME</${Code}>` : null}`}</${Loaded}></${Card}>`;
}
