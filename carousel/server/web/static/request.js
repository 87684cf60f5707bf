// The view of one request: its timeline, by its X-Request-Id.
import { useEffect, useState } from "preact/hooks";
import { getJson } from "./api.js";
import { Bar, Legend, Problem, duration, html, number } from "./view.js";

// By the stamp with which a phase begins.
const PHASES = {
  tokenizer_out: "queue",
  row: "prefill",
  first_token: "decode",
  retraction: "queue",
  attempt: "tokenize",
  closed: "deliver",
};
const WORDS = [
  ["tokenize", "tokenize"],
  ["queue", "queue: waits for a row"],
  ["prefill", "prefill"],
  ["decode", "decode"],
  ["deliver", "deliver"],
];

const WITHOUT_VALUE = new Set(["tokenizer_in", "tokenizer_out", "retraction", "detokenizer"]);

/** An id of the address; one that somebody wrote there without its escapes is taken as it is. */
function decoded(id) {
  try {
    return decodeURIComponent(id);
  } catch {
    return id;
  }
}

/** Phases of a sequence: [name, seconds when it begins, seconds that it takes]. */
function phasesOf(stamps) {
  const phases = [];
  let [name, since, hasTokens] = ["tokenize", 0, false];
  const close = (at) => {
    if (at > since) phases.push([name, since, at - since]);
    since = at;
  };
  for (const [stamp, at] of stamps) {
    hasTokens ||= stamp === "first_token";
    if (!PHASES[stamp]) continue;
    close(at);
    // What a row that was lost had is computed again, beside nothing new.
    name = stamp === "row" && hasTokens ? "decode" : PHASES[stamp];
  }
  close(stamps.at(-1)?.[1] ?? 0);
  return phases;
}

function Sequence({ sequence }) {
  const { stamps, index, attempt, reason } = sequence;
  const phases = phasesOf(stamps);
  const total = stamps.at(-1)?.[1] ?? 0;
  const parts = phases.map(([name, since, length]) => [name, length, `${name}: ${duration(length)} after ${duration(since)}`]);
  const sums = WORDS.map(([name]) => [name, phases.filter(([each]) => each === name).reduce((sum, [, , length]) => sum + length, 0)]);
  return html`<section class="card sequence">
    <h3>Sequence ${index}${attempt ? `, made again ${attempt} times` : ""}</h3>
    <p>
      ${new Date(1000 * sequence.started_s).toLocaleString()} · ${duration(total)} · ended by ${reason} ·${" "}
      ${number(sequence.prompt_tokens)} prompt tokens (${number(sequence.cached_tokens)} cached),${" "}
      ${number(sequence.completion_tokens)} output tokens
    </p>
    <${Bar} parts=${parts} total=${total} label="Phases: ${sums.map(([name, sum]) => `${name} ${duration(sum)}`).join(", ")}" />
    <${Legend} entries=${WORDS.map(([name, words], at) => [name, `${words} ${duration(sums[at][1])}`])} />
    <div class="scroll" tabindex="0" role="region" aria-label="Moments of sequence ${index}">
      <table>
        <thead>
          <tr><th>Moment</th><th>After</th><th>Value</th></tr>
        </thead>
        <tbody>
          ${stamps.map(([name, at, value]) => html`<tr><td>${name}</td><td>${duration(at)}</td><td>${WITHOUT_VALUE.has(name) ? "" : number(value)}</td></tr>`)}
        </tbody>
      </table>
    </div>
  </section>`;
}

export function RequestView({ id, hasKey }) {
  const [draft, setDraft] = useState(decoded(id));
  const [found, setFound] = useState([]);
  const [error, setError] = useState(null);
  useEffect(() => {
    if (!id || !hasKey) return;
    getJson(`timelines/${id}`).then(
      // To a browser an id of dots alone is a way up, where something else answers.
      (answer) => (Array.isArray(answer) ? setFound(answer) : setError(new Error("no request can be found by this id"))),
      setError,
    );
  }, [id]);
  const look = (event) => {
    event.preventDefault();
    location.hash = `request/${encodeURIComponent(draft.trim())}`;
  };
  return html`<main class="request" aria-label="Request">
    <form class="line" onSubmit=${look}>
      <label for="request-id">X-Request-Id</label>
      <input id="request-id" value=${draft} autocomplete="off" spellcheck="false" onInput=${(event) => setDraft(event.target.value)} />
      <button type="submit" class="main" disabled=${!draft.trim()}>Show</button>
    </form>
    <p class="note">Requests of this page have a timeline when they have ended, and others that are sampled.</p>
    <${Problem} error=${error} />
    ${found.map((sequence) => html`<${Sequence} sequence=${sequence} />`)}
  </main>`;
}
