// The view of a chat: messages, what is written next, and the fields of requests.
import { useEffect, useLayoutEffect, useReducer, useRef, useState } from "preact/hooks";
import { getJson } from "./api.js";
import { shownBelow } from "./conversation.js";
import { Field, fieldsOf, isUsual } from "./fields.js";
import { Message } from "./message.js";
import { Session } from "./session.js";
import { Problem, html } from "./view.js";

const NEAR_END_PX = 80;
const MAX_ALTERNATIVES = 20;
const isWide = matchMedia("(min-width: 900px)");

function Settings({ session, models }) {
  const { texts, fields } = session;
  const set = (name, value) => {
    session[name] = value;
    session.changed();
  };
  const onText = (name, text) => {
    texts[name] = text;
    session.changed();
  };
  const field = (each) => html`<${Field} key=${each.name} field=${each} text=${texts[each.name] ?? ""} onText=${onText} />`;
  const [isOpen, setOpen] = useState(isWide.matches);
  return html`<details class="settings" open=${isOpen} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Settings of requests</summary>
    <div class="field">
      <label for="model">Model</label>
      <select id="model" value=${session.model} onChange=${(event) => set("model", event.target.value)}>
        ${models.map((name) => html`<option value=${name}>${name}</option>`)}
      </select>
    </div>
    <div class="field wide">
      <label for="system">System prompt</label>
      <textarea id="system" rows="3" value=${session.system} onInput=${(event) => set("system", event.target.value)}></textarea>
    </div>
    <div class="field">
      <label for="logprobs">Log-probabilities</label>
      <select
        id="logprobs"
        value=${String(session.numLogprobs)}
        onChange=${(event) => set("numLogprobs", Number(event.target.value))}
      >
        <option value="-1">none</option>
        ${Array.from(
          { length: MAX_ALTERNATIVES + 1 },
          (_, count) => html`<option value=${String(count)}>${count} alternatives</option>`,
        )}
      </select>
    </div>
    ${[
      ["isStreaming", "Stream"],
      ["isTraced", "Keep a timeline"],
    ].map(
      ([name, words]) =>
        html`<label class="check">
          <input type="checkbox" checked=${session[name]} onChange=${(event) => set(name, event.target.checked)} /> ${words}
        </label>`,
    )}
    ${fields.filter(isUsual).map(field)}
    <details>
      <summary>More fields</summary>
      ${fields.filter((each) => !isUsual(each)).map(field)}
    </details>
  </details>`;
}

function Composer({ session }) {
  const [draft, setDraft] = useState("");
  const wrong = session.wrongFields();
  const canSend = !session.isBusy && !wrong.length && draft !== "";
  const send = (event) => {
    event.preventDefault();
    if (!canSend) return;
    session.send(draft);
    setDraft("");
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`<form class="composer" onSubmit=${send}>
    <textarea
      id="message"
      aria-label="Message"
      placeholder="Message (Enter sends, Shift+Enter begins a line, Escape stops)"
      rows="3"
      value=${draft}
      onInput=${(event) => setDraft(event.target.value)}
      onKeyDown=${onKeyDown}
    ></textarea>
    <div class="actions">
      ${session.isBusy
        ? html`<button type="button" class="main" onClick=${() => session.stop()}>Stop</button>`
        : html`<button type="submit" class="main" disabled=${!canSend}>Send</button>`}
      <button type="button" onClick=${() => session.clear()}>New chat</button>
      ${wrong.length ? html`<span class="wrong" role="status">Look at ${wrong.join(", ")}.</span>` : null}
    </div>
  </form>`;
}

export function Chat({ isShown, keyVersion }) {
  const [, refresh] = useReducer((version) => version + 1, 0);
  const [session] = useState(() => new Session(() => refresh()));
  const [models, setModels] = useState([]);
  const [error, setError] = useState(null);
  const log = useRef(null);
  const isAtEnd = useRef(true);

  useEffect(() => {
    if (keyVersion < 0) return;
    Promise.all([getJson("v1/models"), getJson("openapi.json")]).then(
      ([{ data }, openapi]) => {
        session.fields = fieldsOf(openapi);
        const names = data.map(({ id }) => id);
        if (!names.includes(session.model)) session.model = names[0];
        setModels(names);
        setError(null);
      },
      (problem) => setError(problem.status === 401 ? null : problem),
    );
  }, [keyVersion]);

  useEffect(() => {
    const onKeyDown = ({ key }) => key === "Escape" && session.stop();
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, []);

  useLayoutEffect(() => {
    if (isAtEnd.current && log.current) log.current.scrollTop = log.current.scrollHeight;
  });

  const onScroll = ({ target }) => {
    isAtEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR_END_PX;
  };
  const step = (turn, by) => {
    turn.step(by);
    session.changed();
  };
  const turns = shownBelow(session.root);
  return html`<main class="chat" hidden=${!isShown} aria-label="Chat">
    <section class="conversation">
      <div class="log" role="log" tabindex="0" aria-label="Conversation" ref=${log} onScroll=${onScroll}>
        ${turns.length ? null : html`<p class="empty">Say something to the model.</p>`}
        ${turns.map(
          (turn) =>
            html`<${Message}
              key=${turn.id}
              turn=${turn}
              isBusy=${session.isBusy}
              onEdit=${(each, text) => session.edit(each, text)}
              onAgain=${(each) => session.again(each)}
              onStep=${step}
            />`,
        )}
      </div>
      <${Problem} error=${error} />
      <${Composer} session=${session} />
    </section>
    <${Settings} session=${session} models=${models} />
  </main>`;
}
