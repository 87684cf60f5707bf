// Recording of steps: begun and ended here, and handed over as a file for Perfetto.
import { useEffect, useState } from "preact/hooks";
import { ask, getJson } from "./api.js";
import { Problem, html } from "./view.js";

const FORGET_MS = 10000;

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), FORGET_MS);
}

/** `isOn`: the scheduler records, whoever has asked for it. */
export function Profile({ isOn }) {
  const [file, setFile] = useState("");
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => setError(null), [isOn]);
  const run = (work) => async () => {
    setBusy(true);
    await work().then(() => setError(null), setError);
    setBusy(false);
  };
  const tell = (path) => getJson(path, { method: "POST", body: "{}" });
  const begin = run(() => tell("start_profile"));
  const end = run(async () => setFile((await tell("stop_profile")).file));
  const download = run(async () => save(await (await ask(`profiles/${file}`)).blob(), file));
  return html`<section class="card profile">
    <h3>Profile of steps</h3>
    <p>
      What each process does in each step, and every request's way through them: a file for${" "}
      <a href="https://ui.perfetto.dev" target="_blank" rel="noopener noreferrer">Perfetto</a>.
    </p>
    <p class="line">
      ${isOn
        ? html`<button type="button" disabled=${isBusy} onClick=${end}>Stop recording</button>`
        : html`<button type="button" disabled=${isBusy} onClick=${begin}>Record steps</button>`}
      <button type="button" disabled=${isBusy || isOn || !file} onClick=${download}>Download</button>
      <span role="status">${isOn ? "recording" : file}</span>
    </p>
    <${Problem} error=${error} />
  </section>`;
}
