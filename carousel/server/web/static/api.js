// Questions to the server: paths are relative to the page, so that it works behind a proxy's root path, too.
// The key is kept for the tab alone.
const BASE = new URL("./", document.baseURI);
const KEY = "carousel-key";
const keyListeners = new Set();

export const needsKey = document.querySelector('meta[name="needs-key"]').content === "yes";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  tellOfKey();
}

/** Call `listener` with what is the matter with the key: "" where nothing is. */
export function onKey(listener) {
  keyListeners.add(listener);
  return () => keyListeners.delete(listener);
}

function tellOfKey(problem = "") {
  for (const listener of keyListeners) listener(problem);
}

export function url(path) {
  return new URL(path, BASE);
}

/** A new id of `bytes` bytes in hex; crypto.randomUUID is missing where the page came over HTTP. */
export function newId(bytes = 16) {
  return [...crypto.getRandomValues(new Uint8Array(bytes))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The response to a question. Throws ApiError for all but 2xx. */
export async function ask(path, { method = "GET", body, headers = {}, signal } = {}) {
  const key = storedKey();
  const given = { ...headers };
  if (key) given.Authorization = `Bearer ${key}`;
  if (body !== undefined) given["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(url(path), { method, body, headers: given, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // Not ours: a proxy's page.
  }
  if (response.status === 401) tellOfKey(key ? "The server does not know this key." : "This server asks for a key.");
  throw new ApiError(response.status, `${response.status}: ${message.slice(0, 2000)}`);
}

export async function getJson(path, options) {
  return (await ask(path, options)).json();
}

/** The data of each event of an answer, parsed. Throws ApiError where an event is an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.startsWith("data: ") ? block.slice(6) : "";
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.code ?? 500, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
