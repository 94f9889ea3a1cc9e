// The server's state beside the list of conversations: asked for every two seconds while the page is in view.

import { health } from "./api.js";
import { byId } from "./dom.js";

const INTERVAL = 2000; // ms
const STATES = {
  ok: ["good", "Ready"],
  ready: ["good", "Ready"],
  loading: ["busy", "Loading the model"],
  draining: ["busy", "Shutting down"],
};

let last = null; // {tokens, time} of the last look at the counter

/** onReady() is called each time the server comes into reach. */
export function watchServer(onReady) {
  let wasReady = false;
  let timer = 0;
  const look = async () => {
    clearTimeout(timer);
    if (document.visibilityState === "hidden") return;
    const state = await health();
    show(state, rate(state?.decode_tokens));
    const isReady = STATES[state?.status]?.[0] === "good";
    if (isReady && !wasReady) onReady();
    wasReady = isReady;
    clearTimeout(timer);
    timer = setTimeout(look, INTERVAL);
  };
  document.addEventListener("visibilitychange", look);
  look();
}

/** Tokens a second since the last look. */
function rate(tokens) {
  const before = last;
  const now = { tokens, time: performance.now() };
  last = Number.isFinite(tokens) ? now : null;
  if (last === null || before === null || tokens < before.tokens) return null;
  return (1000 * (tokens - before.tokens)) / (now.time - before.time);
}

function show(state, tokensPerSecond) {
  const [kind, text] = state === null ? ["bad", "Not reachable"] : STATES[state.status] ?? ["bad", `Not ready: ${state.status}`];
  byId("server-dot").className = `dot ${kind}`;
  byId("server-state").textContent = text;
  byId("server-running").textContent = state?.running ?? "–";
  byId("server-waiting").textContent = state?.waiting ?? "–";
  byId("server-rate").textContent = tokensPerSecond === null ? "–" : tokensPerSecond.toFixed(tokensPerSecond < 10 ? 1 : 0);
  const percent = Number.isFinite(state?.kv_cache_usage) ? 100 * state.kv_cache_usage : null;
  byId("server-kv").textContent = percent === null ? "–" : `${percent.toFixed(percent > 0 && percent < 10 ? 1 : 0)} %`;
  const gauge = byId("kv-gauge");
  gauge.setAttribute("aria-valuenow", (percent ?? 0).toFixed(1));
  gauge.firstElementChild.style.width = `${percent ?? 0}%`;
}
