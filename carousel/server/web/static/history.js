// Rates over the last two minutes, and the scheduler's last steps, as charts.
import { useEffect, useRef, useState } from "preact/hooks";
import { getJson, url } from "./api.js";
import { Problem, html } from "./view.js";

const HEIGHT_PX = 160;

/** The chart library, which no other view needs, and its style. */
async function loadChart() {
  if (!document.querySelector("link[data-chart]")) {
    const link = document.createElement("link");
    Object.assign(link, { rel: "stylesheet", href: url("page/vendor/uplot.css").href });
    link.dataset.chart = "";
    document.head.append(link);
  }
  return (await import("uplot")).default;
}

function Chart({ label, columns, lines, isTime }) {
  const place = useRef(null);
  const chart = useRef(null);
  useEffect(() => {
    let isOver = false;
    let watcher = null;
    loadChart().then((UPlot) => {
      if (isOver) return;
      const element = place.current;
      const style = getComputedStyle(element);
      const colour = (name) => style.getPropertyValue(name);
      const axis = { stroke: colour("--text"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
      const width = () => Math.max(200, element.clientWidth);
      const options = {
        width: width(),
        height: HEIGHT_PX,
        scales: { x: { time: isTime } },
        axes: [axis, { ...axis, size: 60 }],
        series: [{}, ...lines.map(([words, name]) => ({ label: words, stroke: colour(name), width: 1.5 }))],
        cursor: { show: false },
        legend: { live: false },
      };
      chart.current = new UPlot(options, columns, element);
      watcher = new ResizeObserver(() => chart.current.setSize({ width: width(), height: HEIGHT_PX }));
      watcher.observe(element);
    });
    return () => {
      isOver = true;
      watcher?.disconnect();
      chart.current?.destroy();
    };
  }, []);
  useEffect(() => chart.current?.setData(columns), [columns]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${place}></div>`;
}

function Steps() {
  const [steps, setSteps] = useState(null);
  const [error, setError] = useState(null);
  const load = () =>
    getJson("stats/iterations").then((records) => {
      setError(null);
      setSteps(records);
    }, setError);
  const column = (read) => steps.map(read);
  return html`<h4>Steps</h4>
    <p>
      <button type="button" onClick=${load}>Show the last steps</button>
    </p>
    <${Problem} error=${error} />
    ${steps?.length
      ? html`<${Chart}
          key=${steps.at(-1).iter}
          label="Milliseconds and sequences of each of the last ${steps.length} steps"
          columns=${[column(({ iter }) => iter), column((step) => step.iterLatencyMS), column((step) => step.numActiveRequests)]}
          lines=${[
            ["ms", "--flight"],
            ["requests", "--computed"],
          ]}
          isTime=${false}
        />`
      : null}
    ${steps && !steps.length ? html`<p>There are none yet.</p>` : null}`;
}

export function History({ history }) {
  const times = history.map(({ at }) => at);
  const column = (read) => history.map(read);
  return html`<section class="card">
    <h3>The last two minutes</h3>
    <${Chart}
      label="Tokens per second"
      columns=${[times, column(({ stats }) => stats.tokens_per_s)]}
      lines=${[["tokens/s", "--output"]]}
      isTime=${true}
    />
    <${Chart}
      label="Sequences that run and that wait"
      columns=${[times, column(({ snapshot }) => snapshot.num_running), column(({ snapshot }) => snapshot.num_waiting)]}
      lines=${[
        ["running", "--computed"],
        ["waiting", "--flight"],
      ]}
      isTime=${true}
    />
    <${Steps} />
  </section>`;
}
