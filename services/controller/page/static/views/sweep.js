// A sweep: one row in the list of jobs, and a view with a curve for each of its settings, the mean over seeds.

import { withQuery } from "../lib/api.js";
import { useEvent, useFetched, useResync, useThrottled } from "../lib/data.js";
import { ago, number, plural, short } from "../lib/format.js";
import { html } from "../lib/html.js";
import { go, link } from "../lib/router.js";
import { Chart } from "../parts/chart.js";
import { Sparkline } from "../parts/sparkline.js";
import { Await, Empty, Meter, Status } from "../parts/states.js";

const DRAWN = 8;
const isSmall = (value) => typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3;
const text = (value) =>
  typeof value === "string" ? value : isSmall(value) ? value.toExponential() : JSON.stringify(value);

/** The jobs, with those of a sweep as one item { sweep, jobs } in the place of its newest. */
export function folded(jobs) {
  const sweeps = new Map();
  return jobs.flatMap((job) => {
    const name = job.sweep?.name;
    if (!name) return [job];
    const known = sweeps.get(name);
    if (known) known.jobs.push(job);
    else sweeps.set(name, { id: `sweep ${name}`, sweep: name, jobs: [job] });
    return known ? [] : [sweeps.get(name)];
  });
}

export function SweepRow({ sweep, jobs, index, style }) {
  const [best] = bySettings(jobs);
  const [done, steps] = ["step", "steps"].map((part) => jobs.reduce((sum, { progress }) => sum + progress[part], 0));
  return html`
    <div role="row" class="job-row" style=${style} aria-rowindex=${index + 2}>
      <span role="cell"></span>
      <span role="cell" class="name">
        <a href=${link(["sweeps", sweep])}>${sweep}</a>
        <small>sweep of ${plural(jobs.length, "job")}</small>
      </span>
      <span role="cell" class="state">
        <span>${statuses(jobs)}</span>
        <small>best: ${best.label}</small>
      </span>
      <span role="cell" class="curve">
        <${Sparkline} values=${best.curve} label="Training reward of the best settings" />
        <b>${number(best.reward)}</b>
      </span>
      <span role="cell" class="figure">${number(best.last)}</span>
      <span role="cell" class="steps">
        <span>${done} of ${steps}</span>
        <${Meter} value=${done} of=${steps} label=${`${done} of ${steps} steps`} />
      </span>
      <span role="cell" class="when"><small>${ago(jobs.at(-1).created_at)}</small></span>
    </div>
  `;
}

function statuses(jobs) {
  const counts = new Map();
  for (const { status } of jobs) counts.set(status, (counts.get(status) ?? 0) + 1);
  return [...counts].map(
    ([of, count]) => html`
      <${Status} of=${of} desired=${of} count=${count} />
    `,
  );
}

/** Jobs that differ in their seeds alone, the best first, with their means. */
function bySettings(jobs) {
  const groups = new Map();
  for (const job of [...jobs].sort((a, b) => (a.id < b.id ? -1 : 1))) {
    const { seed, ...settings } = job.sweep.settings;
    const words = Object.entries(settings).map(([name, value]) => `${name}=${text(value)}`);
    const label = words.join(" ") || "all seeds";
    const group = groups.get(label) ?? { label, settings, jobs: [] };
    groups.set(label, group);
    group.jobs.push(job);
  }
  const mean = (values) => {
    const known = values.filter((value) => value !== null && value !== undefined);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  };
  const found = [...groups.values()].map((group) => {
    const stride = Math.max(...group.jobs.map(({ curve }) => curve.stride));
    const curves = group.jobs.map(({ curve }) => curve.values.filter((_, at) => (at * curve.stride) % stride === 0));
    const curve = Array.from({ length: Math.max(...curves.map((one) => one.length)) }, (_, at) =>
      mean(curves.map((one) => one[at])),
    );
    const of = (part) => mean(group.jobs.map(({ progress }) => progress[part]));
    return { ...group, stride, curve, reward: of("reward"), last: of("held_out_reward"), best: of("held_out_best") };
  });
  const rank = (one) => [one.best ?? -Infinity, one.reward ?? -Infinity];
  return found.sort((a, b) => rank(b)[0] - rank(a)[0] || rank(b)[1] - rank(a)[1] || 0);
}

export function Sweep({ parts }) {
  const loaded = useFetched(withQuery("/v1/overview", { sweep: parts[1], limit: 500 }));
  const soon = useThrottled(loaded.reload, 1000);
  useEvent("jobs", ({ items }) => items.some(({ sweep }) => sweep?.name === parts[1]) && soon());
  useResync(soon);
  return html`
    <${Await} of=${loaded} what="the sweep">
      ${({ items }) =>
        items.length
          ? html`
              <${Loaded} name=${parts[1]} jobs=${items} />
            `
          : html`
              <${Empty}>No job of this sweep is left.<//>
            `}
    <//>
  `;
}

function Loaded({ name, jobs }) {
  const groups = bySettings(jobs);
  const drawn = groups.slice(0, DRAWN).map(({ label, jobs: own, stride, curve }, color) => {
    const points = new Map(curve.flatMap((value, at) => (value === null ? [] : [[at * stride, value]])));
    return { metric: "reward", label: "training", style: "solid", job: own[0].id, name: label, color, points };
  });
  const lines = drawn.filter(({ points }) => points.size);
  const note = `mean over seeds${groups.length > DRAWN ? `, the best ${DRAWN} settings` : ""}`;
  const last = Math.max(1, ...lines.flatMap(({ points }) => [...points.keys()]));
  const names = [...new Set(groups.flatMap(({ settings }) => Object.keys(settings)))];
  const open = (line, step) => go(link(["jobs", line.job, "samples"], { purpose: "train", step }));
  return html`
    <div class="head job-head">
      <p class="crumbs">
        <a href=${link(["jobs"])}>Jobs</a>
        ${" / "}sweep
      </p>
      <h1>${name}</h1>
      ${statuses(jobs)}
    </div>
    ${
      lines.length
        ? html`
            <div class="charts one"><${Chart} title="Reward" range=${[0, last]} ...${{ note, lines, open }} /></div>
          `
        : html`
            <${Empty}>No step is trained yet: the curves begin with the first.<//>
          `
    }
    <div class="card scroll" tabindex="0" role="region" aria-label="Settings of the sweep">
      <table class="grid">
        <thead>
          <tr>
            ${[...names, "Best held out", "Held out", "Reward", "Jobs"].map(
              (title, at) => html`
                <th scope="col" class=${at >= names.length && title !== "Jobs" ? "num" : ""}>${title}</th>
              `,
            )}
          </tr>
        </thead>
        <tbody>
          ${groups.map(
            (group, at) => html`
              <${Settings} key=${group.label} ...${{ group, at, names }} />
            `,
          )}
        </tbody>
      </table>
    </div>
  `;
}

function Settings({ group, at, names }) {
  return html`
    <tr>
      ${names.map(
        (name, column) => html`
          <td>
            <i class=${!column && at < DRAWN ? `swatch c${at} solid` : ""} aria-hidden="true"></i>
            ${" "}
            <code>${name in group.settings ? text(group.settings[name]) : ""}</code>
          </td>
        `,
      )}
      ${[group.best, group.last, group.reward].map(
        (value) => html`
          <td class="num">${number(value)}</td>
        `,
      )}
      <td class="seeds">
        ${group.jobs.map(
          ({ id, status, sweep }) => html`
            <span>
              <a href=${link(["jobs", id])}>${named(id, sweep.settings)}</a>
              ${" "}
              <span class="soft">${status}</span>
            </span>
          `,
        )}
      </td>
    </tr>
  `;
}

const named = (id, { seed }) => (seed === undefined ? short(id) : `seed ${seed}`);
