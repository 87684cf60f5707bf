// The largest nodes of the radix tree, each below its parent.
import { Bar, html, number } from "./view.js";

const SHOWN = 100;
const DEEPEST = 12;

/** Places of the columns in the order of a walk from the roots, each with its depth. */
function walk(tree) {
  const at = new Map(tree.id.map((id, place) => [id, place]));
  const below = new Map();
  for (const [place, parent] of tree.parent.entries()) {
    const key = at.has(parent) ? parent : null; // a root, or too small to be among them
    below.set(key, [...(below.get(key) ?? []), place]);
  }
  const found = [];
  const open = (below.get(null) ?? []).map((place) => [place, 0]).reverse();
  while (open.length) {
    const [place, depth] = open.pop();
    found.push([place, depth]);
    for (const each of (below.get(tree.id[place]) ?? []).toReversed()) open.push([each, depth + 1]);
  }
  return found;
}

export function Tree({ tree }) {
  const longest = Math.max(1, ...tree.num_tokens);
  const nodes = walk(tree);
  return html`<section class="card">
    <h3>Radix tree (<span data-figure="nodes">${number(tree.num_nodes)}</span> nodes)</h3>
    ${nodes.length
      ? html`<div class="scroll" tabindex="0" role="region" aria-label="Radix tree">
          <table class="tree">
            <thead>
              <tr><th>Node</th><th>Tokens</th><th>Locks</th><th>Age</th><th>Hits</th><th>Retention</th></tr>
            </thead>
            <tbody>
              ${nodes.slice(0, SHOWN).map(
                ([place, depth]) =>
                  html`<tr key=${tree.id[place]}>
                    <td>
                      <span class="node" style=${{ marginLeft: `${Math.min(depth, DEEPEST) * 0.8}rem` }}>${tree.id[place]}</span>
                      <${Bar}
                        parts=${[[tree.lock[place] ? "computed" : "cached", tree.num_tokens[place], ""]]}
                        total=${longest}
                        label="${number(tree.num_tokens[place])} tokens"
                      />
                    </td>
                    <td>${number(tree.num_tokens[place])}</td>
                    <td>${tree.lock[place]}</td>
                    <td>${number(tree.age[place])}</td>
                    <td>${number(tree.num_hits[place])}</td>
                    <td>${tree.retention[place]}</td>
                  </tr>`,
              )}
            </tbody>
          </table>
        </div>`
      : html`<p>It is empty.</p>`}
    ${nodes.length > SHOWN ? html`<p>${number(nodes.length - SHOWN)} more of the largest are not shown.</p>` : null}
  </section>`;
}
