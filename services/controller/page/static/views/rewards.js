// Rewards of all jobs at work, and the alerts in words. `#/rewards/ID` shows one job's, as its tab does.

import { all, get, jobPath } from "../lib/api.js";
import { useEvent, useFetched, useFollowed, useLoaded, useThrottled } from "../lib/data.js";
import { number, plural } from "../lib/format.js";
import { html } from "../lib/html.js";
import { link } from "../lib/router.js";
import { Await, Empty } from "../parts/states.js";
import { JobRewards } from "./rewards/job.js";

const MOST = 40;
const AT_WORK = new Set(["running", "paused", "starting", "quarantined"]);

export function Rewards({ parts }) {
  return parts[1]
    ? html`
        <${OneJob} id=${parts[1]} />
      `
    : html`
        <${Overview} />
      `;
}

function OneJob({ id }) {
  const loaded = useFetched(jobPath(id));
  const soon = useThrottled(loaded.reload, 500);
  useFollowed(id);
  useEvent("jobs", ({ items }) => items.some((job) => job.id === id) && soon());
  return html`
    <${Await} of=${loaded} what="the job">
      ${(job) => html`
        <div class="head">
          <h1>
            Rewards of${" "}
            <a href=${link(["jobs", id])}>${job.name}</a>
          </h1>
        </div>
        <${JobRewards} job=${job} />
      `}
    <//>
  `;
}

function Overview() {
  const loaded = useLoaded(load, []);
  const soon = useThrottled(loaded.reload, 3000);
  useEvent("jobs", soon);
  return html`
    <div class="head"><h1>Rewards</h1></div>
    <${Alerts} />
    <${Await} of=${loaded} what="rewards">
      ${(jobs) =>
        jobs.length
          ? html`
              <div class="card scroll" tabindex="0" role="region" aria-label="Rewards of jobs">
                <table class="grid">
                  <thead>
                    <tr>
                      <th scope="col">Job</th>
                      <th scope="col">Reward</th>
                      <th scope="col" class="num">Weight</th>
                      <th scope="col" class="num">Last mean</th>
                      <th scope="col" class="num">No score</th>
                      <th scope="col">Shadows</th>
                      <th scope="col">State</th>
                    </tr>
                  </thead>
                  <tbody>${jobs.flatMap(rowsOf)}</tbody>
                </table>
              </div>
            `
          : html`
              <${Empty}>No job is at work.<//>
            `}
    <//>
  `;
}

async function load(signal) {
  const jobs = (await all("/v1/overview", {}, signal)).filter(({ status }) => AT_WORK.has(status)).slice(0, MOST);
  return Promise.all(
    jobs.map(async (job) => {
      const after = Math.max(0, job.progress.step - 2);
      const [rewards, metrics] = await Promise.all([
        get(jobPath(job.id, "rewards"), signal),
        get(jobPath(job.id, `metrics?cursor=${after}`), signal),
      ]);
      const values = Object.assign({}, ...metrics.items.map((row) => row.values));
      return { ...job, rewards, values };
    }),
  );
}

function rowsOf({ id, name, rewards, values }) {
  const parts = Object.entries(rewards.active.rewards);
  return parts.map(([reward, part], at) => {
    const shadows = Object.entries(rewards.comparison).filter(([, comparison]) => comparison.beside === reward);
    const of = part.held_out_only ? "val-core" : "critic";
    return html`
      <tr key=${`${id}/${reward}`} class=${at ? "" : "first"}>
        ${
          at === 0 &&
          html`
            <th scope="rowgroup" rowspan=${parts.length}><a href=${link(["rewards", id])}>${name}</a></th>
          `
        }
        <th scope="row">${reward}</th>
        <td class="num">
          ${
            part.weight
              ? number(part.weight)
              : html`
                  <span class="soft">${part.held_out_only ? "watches validations" : "watches"}</span>
                `
          }
        </td>
        <td class="num">${number(values[`${of}/rewards/${reward}/mean`])}</td>
        <td class="num">${number(values[`${of}/rewards/${reward}/missing`] ?? 0)}</td>
        <td>
          ${shadows.map(
            ([shadow, { train }]) => html`
              ${shadow}: rank correlation ${number(train.spearman)}
            `,
          )}
        </td>
        <td>
          ${
            rewards.pending && at === 0
              ? html`
                  <span class="badge warn">change pending</span>
                `
              : ""
          }
        </td>
      </tr>
    `;
  });
}

export function Alerts() {
  const loaded = useFetched("/v1/alerts");
  const soon = useThrottled(loaded.reload, 5000);
  useEvent("fleet", soon);
  useEvent("jobs", soon);
  const alerts = loaded.data ?? loaded.stale;
  if (!alerts) return null;
  if (!alerts.length) return html`<p class="soft quiet-alerts">No alert: all is well.</p>`;
  return html`
    <section class="card alerts warn" aria-label="Alerts">
      <h2>${plural(alerts.length, "alert")}</h2>
      <ul>
        ${alerts.map(
          ({ name, text, job_id: job }) => html`
            <li>
              <b>${name}</b>
              ${" "}${text}${" "}
              ${job && html`<a href=${link(["jobs", job])}>Open the job</a>`}
            </li>
          `,
        )}
      </ul>
    </section>
  `;
}
