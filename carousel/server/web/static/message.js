// One message of the conversation: its text, its branches, and what is known of an answer.
import { useMemo, useState } from "preact/hooks";
import { markup } from "./markdown.js";
import { Problem, duration, html, number } from "./view.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1];

function Markdown({ text }) {
  const made = useMemo(() => markup(text), [text]);
  return made === null
    ? html`<div class="text plain">${text}</div>`
    : html`<div class="text" dangerouslySetInnerHTML=${{ __html: made }}></div>`;
}

function percent(logprob) {
  return `${number(100 * Math.exp(logprob), 2)} %`;
}

function visible(token) {
  return token.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥") || "∅";
}

/** Tokens, coloured by their probability; one that is chosen shows what else could have stood in its place. */
function Tokens({ tokens }) {
  const [chosen, choose] = useState(-1);
  const token = tokens[chosen];
  const toggle = (index) => choose(index === chosen ? -1 : index);
  return html`<div class="text plain tokens">
      ${tokens.map(
        ({ token: text, logprob }, index) =>
          // No button element: its text would not break into lines like the text around it.
          html`<span
              role="button"
              tabindex="0"
              class="token level${LEVELS.filter((level) => Math.exp(logprob) < level).length}"
              aria-pressed=${index === chosen ? "true" : "false"}
              title=${percent(logprob)}
              onClick=${() => toggle(index)}
              onKeyDown=${(event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), toggle(index))}
              >${visible(text)}</span
            >`,
      )}
    </div>
    ${token
      ? html`<table class="alternatives">
          <caption>
            Token ${chosen + 1}: <code>${JSON.stringify(token.token)}</code>, log-probability${" "}
            <span class="logprob">${String(token.logprob)}</span>
          </caption>
          <thead>
            <tr><th>Alternative</th><th>Probability</th><th>Log-probability</th></tr>
          </thead>
          <tbody>
            ${token.top_logprobs.map(
              (each) =>
                html`<tr>
                  <td><code>${JSON.stringify(each.token)}</code></td>
                  <td>${percent(each.logprob)}</td>
                  <td>${String(each.logprob)}</td>
                </tr>`,
            )}
          </tbody>
        </table>`
      : null}`;
}

function Copied({ label, text }) {
  return html`<div class="copied">
    <h4>${label}</h4>
    ${navigator.clipboard
      ? html`<button type="button" class="small" onClick=${() => navigator.clipboard.writeText(text)}>Copy</button>`
      : null}
    <pre tabindex="0">${text}</pre>
  </div>`;
}

/** What an answer took, and how to ask for it elsewhere. */
function Account({ answer }) {
  const { usage, startedAt, firstAt, endedAt, requestId, finish } = answer;
  const facts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    facts.push(`${number(usage.prompt_tokens)} prompt tokens (${number(cached)} cached)`);
    facts.push(`${number(usage.completion_tokens)} output tokens`);
    const streamed = (endedAt - firstAt) / 1000;
    if (usage.completion_tokens > 1 && streamed > 0) {
      facts.push(`${number((usage.completion_tokens - 1) / streamed, 1)} tokens/s`);
    }
  }
  if (firstAt) facts.push(`first after ${duration((firstAt - startedAt) / 1000)}`);
  if (finish) facts.push(`ended by ${finish}`);
  return html`<footer>
    <p class="facts">${facts.join(" · ")}</p>
    <details>
      <summary>Request</summary>
      <p>
        Id <code>${requestId}</code>
        ${answer.isTraced ? html` · <a href="#request/${requestId}">timeline</a>` : null}
      </p>
      <${Copied} label="Body" text=${answer.body} />
      <${Copied} label="Command" text=${answer.curl} />
      ${answer.prompt ? html`<${Copied} label="Log-probabilities of the prompt" text=${JSON.stringify(answer.prompt)} />` : null}
    </details>
  </footer>`;
}

function Branches({ turn, isBusy, onStep }) {
  const { children, chosen } = turn.parent;
  if (children.length < 2) return null;
  const step = (by) => () => onStep(turn, by);
  return html`<span class="branches">
    <button type="button" class="small" aria-label="Branch before" disabled=${isBusy || !chosen} onClick=${step(-1)}>‹</button>
    ${chosen + 1} of ${children.length}
    <button
      type="button"
      class="small"
      aria-label="Branch after"
      disabled=${isBusy || chosen === children.length - 1}
      onClick=${step(1)}
    >
      ›
    </button>
  </span>`;
}

function Editor({ text, onDone }) {
  const [draft, setDraft] = useState(text);
  return html`<form
    class="editor"
    onSubmit=${(event) => {
      event.preventDefault();
      onDone(draft);
    }}
  >
    <textarea aria-label="Edited message" rows="4" value=${draft} onInput=${(event) => setDraft(event.target.value)}></textarea>
    <div class="actions">
      <button type="submit" class="main">Send</button>
      <button type="button" onClick=${() => onDone(null)}>Cancel</button>
    </div>
  </form>`;
}

export function Message({ turn, isBusy, onEdit, onAgain, onStep }) {
  const [isEdited, setEdited] = useState(false);
  const [hasTokens, showTokens] = useState(true);
  const { role, text, reasoning, tokens, answer } = turn;
  const isAnswer = role === "assistant";
  const finishEdit = (draft) => {
    setEdited(false);
    if (draft !== null) onEdit(turn, draft);
  };
  let content = html`<div class="text plain">${text}</div>`;
  if (isEdited) content = html`<${Editor} text=${text} onDone=${finishEdit} />`;
  else if (isAnswer && tokens.length && hasTokens) content = html`<${Tokens} tokens=${tokens} />`;
  else if (isAnswer) content = html`<${Markdown} text=${text} />`;
  return html`<article class="turn ${role}" aria-busy=${answer?.isLive ? "true" : "false"}>
    <header>
      <h3>${isAnswer ? "Answer" : "You"}</h3>
      <${Branches} turn=${turn} isBusy=${isBusy} onStep=${onStep} />
      ${isAnswer && tokens.length
        ? html`<button type="button" class="small" onClick=${() => showTokens(!hasTokens)}>
            ${hasTokens ? "As text" : "As tokens"}
          </button>`
        : null}
      ${isAnswer
        ? html`<button type="button" class="small" disabled=${isBusy} onClick=${() => onAgain(turn)}>Again</button>`
        : html`<button type="button" class="small" disabled=${isBusy} onClick=${() => setEdited(true)}>Edit</button>`}
    </header>
    ${reasoning ? html`<details open=${answer?.isLive}><summary>Reasoning</summary><div class="text plain">${reasoning}</div></details>` : null}
    ${content}
    <${Problem} error=${answer?.error} />
    ${answer && !answer.isLive ? html`<${Account} answer=${answer} />` : null}
  </article>`;
}
