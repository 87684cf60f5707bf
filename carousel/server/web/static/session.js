// A chat with the model: the conversation, the requests for its answers, and the answers as they come.
import { ask, events, needsKey, newId, url } from "./api.js";
import { newConversation, pathTo, shownBelow } from "./conversation.js";
import { problemWith, valueOf } from "./fields.js";

const PATH = "v1/chat/completions";
const SHOWN_EVERY_MS = 50;

export class Session {
  constructor(onChange) {
    this.root = newConversation();
    this.model = null;
    this.system = "";
    this.fields = [];
    this.texts = {}; // by the field's name
    this.numLogprobs = -1; // alternatives of each token; -1: no log-probabilities
    this.isStreaming = true;
    this.isTraced = true;
    this.isBusy = false;
    this._stopping = null;
    this._timer = 0;
    this._onChange = onChange;
  }

  changed() {
    clearTimeout(this._timer);
    this._timer = 0;
    this._onChange();
  }

  /** The names of fields in which something is wrong. */
  wrongFields() {
    return this.fields.filter((field) => problemWith(field, this.texts[field.name] ?? "")).map(({ name }) => name);
  }

  clear() {
    this.stop();
    this.root = newConversation();
    this.changed();
  }

  send(text) {
    const last = shownBelow(this.root).at(-1) ?? this.root;
    return this._answer(last.add("user", text));
  }

  edit(turn, text) {
    return this._answer(turn.parent.add("user", text));
  }

  /** Ask for another answer in the place of `turn`. */
  again(turn) {
    return this._answer(turn.parent);
  }

  stop() {
    this._stopping?.abort();
  }

  _body(asked) {
    const turns = pathTo(asked).filter(({ role, text }) => role === "user" || text !== "");
    const messages = turns.map(({ role, text }) => ({ role, content: text }));
    if (this.system) messages.unshift({ role: "system", content: this.system });
    const body = { messages };
    if (this.model) body.model = this.model;
    for (const field of this.fields) {
      const text = this.texts[field.name] ?? "";
      if (text !== "") body[field.name] = valueOf(field, text);
    }
    if (this.numLogprobs >= 0) Object.assign(body, { logprobs: true, top_logprobs: this.numLogprobs });
    if (this.isStreaming) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
    return body;
  }

  async _answer(asked) {
    const body = this._body(asked);
    const requestId = newId();
    const text = JSON.stringify(body, null, 2);
    const answer = { requestId, body: text, curl: curlOf(text, requestId), isLive: true, startedAt: performance.now() };
    Object.assign(answer, { isTraced: this.isTraced, usage: null, finish: "", error: null, firstAt: 0, endedAt: 0 });
    const count = Number(this.texts.n || 1);
    const turns = Array.from({ length: count }, () => asked.add("assistant"));
    asked.chosen -= count - 1;
    turns.forEach((turn) => (turn.answer = { ...answer }));
    this.isBusy = true;
    this._stopping = new AbortController();
    this.changed();
    const headers = { "X-Request-Id": requestId };
    // Sampled, so that the request has a timeline.
    if (this.isTraced) headers.traceparent = `00-${newId()}-${newId(8)}-01`;
    try {
      const response = await ask(PATH, { method: "POST", body: text, headers, signal: this._stopping.signal });
      const parts = this.isStreaming ? events(response) : [await response.json()];
      for await (const part of parts) this._take(turns, part);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      for (const turn of turns) {
        if (isStopped) turn.answer.finish ||= "stopped";
        else turn.answer.error = error;
      }
    } finally {
      for (const { answer: each } of turns) Object.assign(each, { isLive: false, endedAt: performance.now() });
      this.isBusy = false;
      this.changed();
    }
  }

  _take(turns, part) {
    for (const choice of part.choices) {
      const turn = turns[choice.index];
      const { content, reasoning_content: reasoning } = choice.delta ?? choice.message;
      if (content || reasoning) turn.answer.firstAt ||= performance.now();
      turn.text += content ?? "";
      turn.reasoning += reasoning ?? "";
      turn.tokens.push(...(choice.logprobs?.content ?? []));
      if (choice.finish_reason) turn.answer.finish = choice.finish_reason;
      if (choice.prompt_logprobs) turn.answer.prompt = choice.prompt_logprobs;
    }
    if (part.usage) turns.forEach((turn) => (turn.answer.usage = part.usage));
    if (part.prompt_logprobs) turns.forEach((turn) => (turn.answer.prompt = part.prompt_logprobs));
    this._timer ||= setTimeout(() => this.changed(), SHOWN_EVERY_MS);
  }
}

/** The command that sends the same request. The key is never in it. */
function curlOf(body, requestId) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = needsKey ? `  -H "Authorization: Bearer $CAROUSEL_API_KEY" \\\n` : "";
  return (
    `curl -N ${quoted(url(PATH).href)} \\\n  -H 'Content-Type: application/json' \\\n${key}` +
    `  -H 'X-Request-Id: ${requestId}' \\\n  -d ${quoted(body)}`
  );
}
