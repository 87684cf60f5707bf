// What all views are made with, and small things that several of them show.
import { h } from "preact";
import htm from "htm";

export const html = htm.bind(h);

/** A number with so many decimals at most, and thousands set apart. */
export function number(value, decimals = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: decimals });
}

/** Seconds as a person reads them. */
export function duration(seconds) {
  if (seconds < 1) return `${number(1000 * seconds, seconds < 0.1 ? 1 : 0)} ms`;
  return seconds < 120 ? `${number(seconds, seconds < 10 ? 2 : 1)} s` : `${number(seconds / 60, 1)} min`;
}

/** An error in words, for the reader. */
export function Problem({ error }) {
  return error ? html`<p class="problem" role="alert">${error.message}</p>` : null;
}

/** A bar of parts: [name of the class, size, words]. */
export function Bar({ parts, total, label }) {
  const shown = parts.filter(([, size]) => size > 0);
  return html`<div class="bar" role="img" aria-label=${label}>
    ${shown.map(
      ([name, size, words]) =>
        html`<span class=${name} title=${words} style=${{ width: `${(100 * size) / Math.max(1e-9, total)}%` }}></span>`,
    )}
  </div>`;
}

/** What the colours of bars mean: [name of the class, words]. */
export function Legend({ entries }) {
  return html`<p class="legend">
    ${entries.map(([name, words]) => html`<span><i class=${name}></i>${words}</span>`)}
  </p>`;
}
