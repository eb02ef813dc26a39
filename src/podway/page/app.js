// The frame: navigation, the session, the stream of changes, and the view of the present address.

import { html, render, useEffect, useState } from "./vendor/preact-htm.js";
import { followChanges, onEnded, openSession } from "./api.js";
import { refresh } from "./state.js";
import { Link, useRoute } from "./router.js";
import { Code, Empty, Loading, Problem } from "./parts/elements.js";
import { Home } from "./views/home.js";
import { ClusterView, Clusters } from "./views/clusters.js";
import { JobPage } from "./views/job.js";
import { PoolView, Pools } from "./views/pools.js";
import { Groups, JobGroupView } from "./views/groups.js";
import { Training } from "./views/training.js";
import { ServiceView, Services } from "./views/services.js";
import { Models } from "./views/models.js";
import { Plan } from "./views/plan.js";
import { Slices } from "./views/slices.js";
import { Cost } from "./views/cost.js";
import { Settings } from "./views/settings.js";

const NAVIGATION = [["/", "Home"], ["/clusters", "Clusters"], ["/pools", "Pools"], ["/groups", "Groups"], ["/training", "Training"], ["/services", "Services"], ["/models", "Models"], ["/plan", "Plan"], ["/slices", "Slices"], ["/cost", "Cost"], ["/settings", "Settings"]];

const AGAIN_MS = 2000;

// What the stream of changes may have changed.
const LIVE = /^\/v1\/(clusters(?!.*\/(planned|models)$)|runs|served|services|pools|groups)/;

function view(path, session) {
  const parts = path.split("/").filter(Boolean);
  if (!parts.length) return html`<${Home} />`;
  if (parts[0] === "clusters" && parts.length === 1) return html`<${Clusters} />`;
  if (parts[0] === "clusters" && parts.length === 2) return html`<${ClusterView} key=${parts[1]} name=${parts[1]} session=${session} />`;
  if (parts[0] === "clusters" && parts[2] === "jobs" && parts.length === 4)
    return html`<${JobPage} key=${path} cluster=${parts[1]} number=${parts[3]} session=${session} />`;
  if (parts[0] === "services" && parts.length === 2) return html`<${ServiceView} key=${parts[1]} name=${parts[1]} session=${session} />`;
  if (parts[0] === "pools" && parts.length === 2) return html`<${PoolView} key=${parts[1]} name=${parts[1]} session=${session} />`;
  if (parts[0] === "groups" && parts.length === 2) return html`<${JobGroupView} key=${parts[1]} name=${parts[1]} session=${session} />`;
  const known = { pools: Pools, groups: Groups, training: Training, services: Services, models: Models, plan: Plan, slices: Slices, cost: Cost, settings: Settings }[parts.length === 1 ? parts[0] : ""];
  return known ? html`<${known} session=${session} />` : html`<${Empty} title="There is nothing here"><p><${Link} to="/">Home</${Link}></p></${Empty}>`;
}

const Closed = ({ title, text }) => html`<main class="closed"><${Empty} title=${title}><p>${text}</p><${Code}>podway ui</${Code}></${Empty}></main>`;

function App() {
  const path = useRoute();
  const [session, setSession] = useState(null);
  const [error, setError] = useState(null);
  const [link, setLink] = useState("live");
  const closed = path === "/expired" || path === "/ended";
  useEffect(() => {
    if (closed) return;
    onEnded(() => setLink("ended"));
    const open = () => openSession().then((found) => {
      setError(null);
      setSession(found);
      followChanges(() => refresh((one) => LIVE.test(one)), setLink);
    }, (problem) => {
      setError(problem);
      if (!problem.status) setTimeout(open, AGAIN_MS); // the server, or the way to it, is away
    });
    open();
    // Whoever comes back to a tab may have got another role meanwhile, have logged in as somebody else, or not be logged in at all.
    const back = () => document.hidden || openSession().then(setSession, () => {});
    document.addEventListener("visibilitychange", back);
    return () => document.removeEventListener("visibilitychange", back);
  }, []);
  if (path === "/expired") return html`<${Closed} title="This link was used or has expired" text="A link opens the page once, within two minutes. Open another one:" />`;
  if (path === "/ended") return html`<${Closed} title="You are logged out" text="Open the page again with:" />`;
  if ((error && error.status === 401) || link === "ended") return html`<${Closed} title="Please log in" text="The page opens with a link of your own:" />`;
  if (error) return html`<main class="closed"><${Problem} error=${error} /></main>`;
  if (!session) return html`<main class="closed"><${Loading} /></main>`;
  const at = path.split("/")[1] || "";
  return html`
    <a class="skip" href="#content">Skip to the content</a>
    <header class="frame"><${Link} to="/" class="brand"><img src="/page/icon.svg" alt="" width="22" height="22" />Podway</${Link}>
      <nav aria-label="Views">${NAVIGATION.map(([to, label]) => html`<${Link} to=${to} aria-current=${to === `/${at}` ? "page" : null}>${label}</${Link}>`)}</nav>
      <span class="who muted">${session.user}</span></header>
    ${link === "away" ? html`<div class="banner" role="status">The server is away. What you see may be old; this page tries again by itself.</div>` : null}
    <main id="content" tabindex="-1">${view(path, session)}</main>`;
}

render(html`<${App} />`, document.getElementById("app"));
