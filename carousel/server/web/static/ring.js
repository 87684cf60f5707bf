// The view of the ring: what the scheduler holds and what each process does, asked for while somebody looks.
import { useEffect, useState } from "preact/hooks";
import { getJson } from "./api.js";
import { History } from "./history.js";
import { Profile } from "./profile.js";
import { Tree } from "./tree.js";
import { Bar, Legend, Problem, duration, html, number } from "./view.js";

const EVERY_MS = 500;
const SECONDS_KEPT = 120;
const ROW_PARTS = [
  ["cached", "prompt, was in the cache"],
  ["computed", "prompt, computed"],
  ["pending", "prompt, to compute"],
  ["output", "output"],
  ["flight", "in flight"],
];

/** Ask every half second while the page is visible; one question at a time. */
function useRing() {
  const [ring, setRing] = useState({ stats: null, snapshot: null, error: null, history: [] });
  useEffect(() => {
    let [timer, isOver] = [0, false];
    const look = async () => {
      if (document.visibilityState === "visible") {
        const stats = await getJson("stats").catch((error) => ({ error }));
        const snapshot = stats.error ? stats : await getJson("snapshot").catch((error) => ({ error }));
        if (isOver) return;
        setRing((before) => next(before, stats, snapshot));
        const status = stats.error?.status;
        if (status === 401 || status === 403) return; // until there is another key
      }
      timer = setTimeout(look, EVERY_MS);
    };
    look();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, []);
  return ring;
}

function next(before, stats, snapshot) {
  const error = stats.error ?? snapshot.error ?? null;
  const at = Date.now() / 1000;
  const shown = { stats: stats.error ? before.stats : stats, snapshot: snapshot.error ? before.snapshot : snapshot, error };
  let { history } = before;
  if (!error) {
    const moment = { at, stats, snapshot };
    history = [...history.filter((each) => each.at > at - SECONDS_KEPT), moment];
  }
  return { ...shown, history };
}

/** Per second, between the oldest moment of the last five seconds and the newest. */
function rate(history, read) {
  const last = history.at(-1);
  const first = history.find(({ at }) => at > last?.at - 5);
  const seconds = last ? last.at - first.at : 0;
  return seconds > 0 ? Math.max(0, read(last) - read(first)) / seconds : 0;
}

function Processes({ processes }) {
  return html`<section class="card">
    <h3>Processes</h3>
    <div class="scroll" tabindex="0" role="region" aria-label="Processes">
      <table class="processes">
        <thead>
          <tr><th>Process</th><th>State</th><th>Process id</th><th>Restarts</th><th>Epoch</th><th>Last turn</th><th>Holds</th></tr>
        </thead>
        <tbody>
          ${Object.entries(processes)
            .filter(([, { state }]) => state !== "absent")
            .map(
              ([name, { state, pid, restarts, epoch, heartbeat_age_s: age, num_running: held }]) =>
                html`<tr key=${name} data-process=${name}>
                  <td>${name}</td>
                  <td class="state ${state}">${state}</td>
                  <td>${pid}</td>
                  <td>${restarts}</td>
                  <td>${epoch}</td>
                  <td>${duration(age)} ago</td>
                  <td>${number(held)}</td>
                </tr>`,
            )}
        </tbody>
      </table>
    </div>
  </section>`;
}

/** Messages between the processes: since their start, and per second. */
function Edges({ history, processes }) {
  const sum = (moment, role, field) =>
    Object.entries(moment.stats.processes)
      .filter(([name]) => name.split(":")[0] === role)
      .reduce((total, [, process]) => total + (process[field] ?? 0), 0);
  const edges = [
    ["client → tokenizer", "messages", "tokenizer", "num_received"],
    ["tokenizer → scheduler", "sequences sent", "tokenizer", "num_sent"],
    ["tokenizer → scheduler", "sequences received", "scheduler", "num_received"],
    ["scheduler → worker", "steps launched", "scheduler", "num_launched"],
    ["worker → scheduler", "steps finished", "scheduler", "num_finished"],
    ["scheduler → detokenizer", "messages", "detokenizer", "num_received"],
    ["detokenizer → client", "messages", "detokenizer", "num_sent"],
  ];
  const now = { stats: { processes } };
  return html`<section class="card">
    <h3>Messages</h3>
    <table>
      <thead>
        <tr><th>From, to</th><th>What</th><th>Since its start</th><th>Per second</th></tr>
      </thead>
      <tbody>
        ${edges.map(
          ([edge, words, role, field]) =>
            html`<tr>
              <td>${edge}</td>
              <td>${words}</td>
              <td>${number(sum(now, role, field))}</td>
              <td>${number(
                rate(history, (moment) => sum(moment, role, field)),
                1,
              )}</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </section>`;
}

function Pages({ pages }) {
  const { num_pages: all, num_free: free, num_cached: cached, num_evictable: evictable, page_size: size } = pages;
  const own = all - free - cached;
  const parts = [
    ["output", own, `${number(own)} of rows alone`],
    ["computed", cached - evictable, `${number(cached - evictable)} in the tree, in use`],
    ["cached", evictable, `${number(evictable)} in the tree, used by nobody`],
  ];
  return html`<section class="card">
    <h3>Pages of the KV cache</h3>
    <p>
      <b data-figure="free-pages">${number(free)}</b> of ${number(all)} free, of ${size} tokens each;${" "}
      ${number(pages.num_evicted)} evicted since the start
    </p>
    <${Bar} parts=${parts} total=${all} label=${parts.map(([, , words]) => words).join(", ")} />
    <${Legend} entries=${parts.map(([name, , words]) => [name, words])} />
  </section>`;
}

/** The parts of a row, in tokens. */
function partsOf(rows, at) {
  const [prompt, computed, tokens] = [rows.num_prompt[at], rows.num_computed[at], rows.num_tokens[at]];
  const done = Math.min(prompt, computed);
  const cached = Math.min(rows.num_cached[at], done);
  const sizes = [cached, done - cached, prompt - done, tokens - prompt, rows.num_in_flight[at]];
  return ROW_PARTS.map(([name, words], part) => [name, sizes[part], `${number(sizes[part])} ${words}`]);
}

function Rows({ rows }) {
  const all = rows.row.map((_, at) => partsOf(rows, at));
  const longest = Math.max(1, ...rows.num_tokens.map((tokens, at) => tokens + rows.num_in_flight[at]));
  return html`<section class="card">
    <h3>Rows (<span data-figure="rows">${rows.row.length}</span>)</h3>
    <${Legend} entries=${ROW_PARTS} />
    <div class="scroll rows" tabindex="0" role="region" aria-label="Rows">
      ${all.map(
        (parts, at) =>
          html`<div class="row" key=${rows.number[at]}>
            <span class="name">${rows.number[at]}</span>
            <${Bar}
              parts=${parts}
              total=${longest}
              label="Sequence ${rows.number[at]} in row ${rows.row[at]}: ${parts.map(([, , words]) => words).join(", ")}"
            />
            <span class="size">${number(rows.num_tokens[at])} of ${number(rows.max_tokens[at])}</span>
          </div>`,
      )}
    </div>
  </section>`;
}

function Waiting({ waiting, total }) {
  return html`<section class="card">
    <h3>Waiting (<span data-figure="waiting">${number(total)}</span>)</h3>
    ${waiting.number.length
      ? html`<div class="scroll" tabindex="0" role="region" aria-label="Waiting">
          <table>
            <thead>
              <tr><th>Sequence</th><th>Reason</th><th>For</th><th>Tokens</th><th>Priority</th><th>Retractions</th></tr>
            </thead>
            <tbody>
              ${waiting.number.map(
                (each, at) =>
                  html`<tr key=${each}>
                    <td>${each}</td>
                    <td>${waiting.reason[at]}</td>
                    <td>${duration(waiting.waited_s[at])}</td>
                    <td>${number(waiting.num_tokens[at])}</td>
                    <td>${waiting.priority[at]}</td>
                    <td>${waiting.num_retractions[at]}</td>
                  </tr>`,
              )}
            </tbody>
          </table>
        </div>`
      : html`<p>Nobody waits.</p>`}
  </section>`;
}

export function Ring() {
  const { stats, snapshot, error, history } = useRing();
  const figure = (words, value) => html`<div><dt>${words}</dt><dd>${value}</dd></div>`;
  const count = (name) => (moment) => moment.snapshot[name];
  return html`<main class="ring" aria-label="Ring">
    <${Problem} error=${error} />
    ${snapshot
      ? html`<dl class="figures">
          ${figure("tokens/s", number(stats.tokens_per_s, 1))} ${figure("running", number(snapshot.num_running))}
          ${figure("waiting", number(snapshot.num_waiting))}
          ${figure("taken in/s", number(rate(history, count("num_accepted")), 1))}
          ${figure("ended/s", number(rate(history, count("num_terminated")), 1))}
          ${figure("retractions/s", number(rate(history, count("num_retracted")), 1))}
          ${snapshot.is_paused ? figure("generation", "paused") : null}
        </dl>`
      : null}
    <div class="cards">
      ${stats ? html`<${Processes} processes=${stats.processes} />` : null}
      ${snapshot
        ? html`<${Rows} rows=${snapshot.rows} />
            <${Waiting} waiting=${snapshot.waiting} total=${snapshot.num_waiting} />
            <${Pages} pages=${snapshot.pages} />
            <${Tree} tree=${snapshot.tree} />
            <${History} history=${history} />
            <${Profile} isOn=${stats.is_profiling} />
            <${Edges} history=${history} processes=${stats.processes} />`
        : null}
    </div>
  </main>`;
}
