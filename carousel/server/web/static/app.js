// The page: its views, one shown at a time by the address's fragment, the key, and whether the server is ready.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { needsKey, onKey, storeKey, storedKey, url } from "./api.js";
import { Chat } from "./chat.js";
import { RequestView } from "./request.js";
import { Ring } from "./ring.js";
import { html } from "./view.js";

const READY_MS = 1000;
const VIEWS = [
  ["chat", "Chat"],
  ["ring", "Ring"],
  ["request", "Request"],
];

function useFragment() {
  const read = () => location.hash.slice(1) || "chat";
  const [fragment, setFragment] = useState(read);
  useEffect(() => {
    const onChange = () => setFragment(read());
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  return fragment;
}

/** Whether a request would be served, asked for until it would. */
function Readiness() {
  const [state, setState] = useState("");
  useEffect(() => {
    let timer = 0;
    const look = async () => {
      let words = "no answer";
      try {
        const { status, role, reason, loaded } = await (await fetch(url("ready"), { cache: "no-store" })).json();
        const share = loaded === undefined ? "" : `, ${Math.round(100 * loaded)} % of the weights`;
        words = status === "ready" ? "ready" : `${role}: ${reason}${share}`;
      } catch {
        // Shown as it is.
      }
      setState(words);
      if (words !== "ready") timer = setTimeout(look, READY_MS);
    };
    look();
    return () => clearTimeout(timer);
  }, []);
  return html`<span class="readiness ${state === "ready" ? "is-ready" : ""}" role="status">${state}</span>`;
}

function KeyForm({ problem }) {
  const [draft, setDraft] = useState("");
  const save = (event) => {
    event.preventDefault();
    storeKey(draft.trim());
    setDraft("");
  };
  return html`<form class="key" onSubmit=${save}>
    <label for="key">API key</label>
    <input
      id="key"
      type="password"
      autocomplete="off"
      value=${draft}
      aria-describedby="key-words"
      onInput=${(event) => setDraft(event.target.value)}
    />
    <button type="submit" class="main" disabled=${!draft.trim()}>Use</button>
    <span id="key-words">${problem || "This server asks for a key."} It is kept until the tab is closed.</span>
  </form>`;
}

function App() {
  const fragment = useFragment();
  const [key, setKey] = useState({ version: needsKey && !storedKey() ? -1 : 0, problem: "" });
  useEffect(
    () =>
      onKey((problem) =>
        setKey(({ version }) => {
          if (problem) return { version, problem };
          return { version: needsKey && !storedKey() ? -1 : Math.abs(version) + 1, problem };
        }),
      ),
    [],
  );
  const [name, ...rest] = fragment.split("/");
  const asksForKey = key.problem !== "" || (needsKey && !storedKey());
  return html`
    <header class="top">
      <h1>Carousel</h1>
      <nav aria-label="Views">
        ${VIEWS.map(
          ([each, words]) => html`<a href="#${each}" aria-current=${each === name ? "page" : "false"}>${words}</a>`,
        )}
      </nav>
      <${Readiness} />
      ${storedKey() ? html`<button type="button" class="small" onClick=${() => storeKey("")}>Forget the key</button>` : null}
    </header>
    ${asksForKey ? html`<${KeyForm} problem=${key.problem} />` : null}
    <${Chat} isShown=${name === "chat"} keyVersion=${key.version} />
    ${name === "ring" && key.version >= 0 ? html`<${Ring} key=${key.version} />` : null}
    ${name === "request" ? html`<${RequestView} key=${fragment} id=${rest.join("/")} hasKey=${key.version >= 0} />` : null}
  `;
}

render(html`<${App} />`, document.getElementById("app"));
