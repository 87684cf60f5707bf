// Fields of a chat request that the form has, with their bounds: those of the server's own description, so that what
// it takes is what is offered.
import { html } from "./view.js";

// The page says these itself.
const OWN = new Set([
  ...["messages", "model", "stream", "stream_options", "logprobs", "top_logprobs", "tools", "tool_choice"],
  ...["parallel_tool_calls", "add_generation_prompt", "return_tokens_as_token_ids"],
]);
const FIRST = [
  ...["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "repetition_penalty"],
  ...["presence_penalty", "frequency_penalty"],
];

/** A bound as it reads. One of 64 bits comes rounded to the next power of two. */
function bound(value, isHighest) {
  if (value === undefined || !Number.isInteger(value) || Number.isSafeInteger(value)) return value;
  return String(BigInt(value) - BigInt(isHighest));
}

function inWords({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  const low = bound(minimum, false) ?? (exclusiveMinimum === undefined ? undefined : `> ${exclusiveMinimum}`);
  const high = bound(maximum, true) ?? (exclusiveMaximum === undefined ? undefined : `< ${exclusiveMaximum}`);
  return low === undefined && high === undefined ? "" : `${low ?? "…"} to ${high ?? "…"}`;
}

/** The fields of the form, the usual ones first: name, kind, bounds, in words. */
export function fieldsOf(openapi) {
  const properties = openapi.components.schemas.ChatBody.properties;
  const found = [];
  for (const [name, schema] of Object.entries(properties)) {
    // Of what has no effect or is refused the description has no such alternatives.
    if (OWN.has(name) || !schema.anyOf) continue;
    const options = schema.anyOf.filter((option) => option.type !== "null");
    const option = options[0];
    const isOne = options.length === 1;
    const kind = option.enum ? "choice" : isOne && option.type ? option.type : "json";
    const known = ["number", "integer", "boolean", "string", "choice"];
    found.push({
      name,
      kind: known.includes(kind) ? kind : "json",
      takesText: options.some(({ type }) => type === "string"),
      choices: option.enum ?? [],
      bounds: option,
      hint: option.type === "number" || option.type === "integer" ? inWords(option) : "",
    });
  }
  const place = (field) => (FIRST.indexOf(field.name) + FIRST.length + 1) % (FIRST.length + 1);
  return found.sort((a, b) => place(a) - place(b));
}

export function isUsual(field) {
  return FIRST.includes(field.name);
}

/** What is wrong with what stands in a field; "" where nothing is. */
export function problemWith(field, text) {
  if (text === "") return "";
  if (field.kind === "number" || field.kind === "integer") {
    const value = Number(text);
    if (!Number.isFinite(value) || (field.kind === "integer" && !/^\s*-?\d+\s*$/.test(text))) {
      return field.kind === "integer" ? "a whole number" : "a number";
    }
    const { minimum, maximum, exclusiveMinimum, exclusiveMaximum } = field.bounds;
    const isOut = value < minimum || value > maximum || value <= exclusiveMinimum || value >= exclusiveMaximum;
    if (isOut) return field.hint;
    if (field.kind === "integer" && !Number.isSafeInteger(value) && !JSON.rawJSON) return "fewer digits, in this browser";
  }
  if (field.kind === "json" && !(field.takesText && !/^\s*[[{]/.test(text))) {
    try {
      JSON.parse(text);
    } catch {
      return "JSON";
    }
  }
  return "";
}

/** A field's value in a request; its text has no problem. */
export function valueOf(field, text) {
  if (field.kind === "boolean") return text === "true";
  if (field.kind === "number") return Number(text);
  if (field.kind === "integer") {
    const value = Number(text);
    return Number.isSafeInteger(value) ? value : JSON.rawJSON(text.trim().replace(/^(-?)0+(?=\d)/, "$1"));
  }
  if (field.kind === "json" && !(field.takesText && !/^\s*[[{]/.test(text))) return JSON.parse(text);
  return text;
}

export function Field({ field, text, onText }) {
  const { name, kind, hint } = field;
  const problem = problemWith(field, text);
  const id = `field-${name}`;
  const shared = {
    id,
    name,
    value: text,
    "aria-invalid": problem ? "true" : "false",
    "aria-describedby": `${id}-hint`,
    onInput: (event) => onText(name, event.target.value),
  };
  const choices = kind === "boolean" ? ["true", "false"] : field.choices;
  return html`<div class="field">
    <label for=${id}>${name}</label>
    ${choices.length
      ? html`<select ...${shared}>
          <option value="">default</option>
          ${choices.map((choice) => html`<option value=${choice}>${choice}</option>`)}
        </select>`
      : kind === "number" || kind === "integer"
        ? html`<input ...${shared} inputmode="decimal" autocomplete="off" />`
        : html`<textarea ...${shared} rows="1" spellcheck="false"></textarea>`}
    <small id="${id}-hint" class=${problem ? "wrong" : ""}>
      ${problem ? `must be ${problem}` : hint || (kind === "json" ? (field.takesText ? "text, or JSON" : "JSON") : "")}
    </small>
  </div>`;
}
