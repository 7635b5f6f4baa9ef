// Replicas, trainers and reward services: who serves which version, what waits, and what is short.

import { useEvent, useFetched, useResync, useThrottled } from "../lib/data.js";
import { hoursWords, number, phaseWords, plural, short } from "../lib/format.js";
import { html } from "../lib/html.js";
import { link } from "../lib/router.js";
import { Await, Empty } from "../parts/states.js";
import { Alerts } from "./rewards.js";

const REPLICA_HEADS = [
  ["Replica"], ["Pool"], ["Health"], ["Job"], ["Version", 1], ["Behind", 1], ["At work", 1], ["Samples made", 1],
  ["Device"],
];
const REWARD_HEADS = [
  ["Reward"], ["Ready", 1], ["Calls at work", 1], ["Calls in 5 min", 1], ["Median latency", 1],
  ["99 % latency", 1], ["Failures", 1],
];
const TONES = { serving: "good", updating: "warn", draining: "warn", lost: "bad", unknown: "bad", idle: "soft" };

export function Fleet() {
  const loaded = useFetched("/v1/fleet");
  const soon = useThrottled(loaded.reload, 1000);
  useEvent("fleet", soon);
  const working = useFetched("/v1/overview?status=running");
  useEvent("jobs", useThrottled(working.reload, 2000));
  useResync(soon);
  const jobs = (working.data ?? working.stale)?.items ?? [];
  return html`
    <div class="head"><h1>Fleet</h1></div>
    <${Alerts} />
    <${Await} of=${loaded} what="the fleet">
      ${(fleet) => html`
        ${fleet.shortages.map(
          ({ component, name, reason }) => html`
            <p class="notice warn">
              <b>${component} ${name}:</b>
              ${" "}${reason}
            </p>
          `,
        )}
        <${Replicas} replicas=${fleet.replicas} names=${new Map(jobs.map(({ id, name }) => [id, name]))} />
        <${Trainers} trainers=${jobs} />
        <${Services} fleet=${fleet} />
      `}
    <//>
  `;
}

const Table = ({ label, heads, children }) => html`
  <div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table class="grid">
      <thead>
        <tr>
          ${heads.map(
            ([title, isNumber]) => html`
              <th scope="col" class=${isNumber ? "num" : ""}>${title}</th>
            `,
          )}
        </tr>
      </thead>
      <tbody>${children}</tbody>
    </table>
  </div>
`;

function Replicas({ replicas, names }) {
  const serving = replicas.filter(({ health }) => health === "serving").length;
  return html`
    <section class="card">
      <div class="row">
        <h2>Replicas</h2>
        <span class="soft">${serving} of ${plural(replicas.length, "replica")} serving</span>
      </div>
      ${
        replicas.length
          ? html`
              <${Table}
                label="Replicas"
                heads=${REPLICA_HEADS}
              >
                ${replicas.map(
                  (one) => html`
                    <tr key=${one.replica_id}>
                      <th scope="row" title=${one.address}>${one.replica_id}</th>
                      <td>${one.pool}</td>
                      <td><span class=${`badge ${TONES[one.health] ?? "soft"}`}>${one.health}</span></td>
                      <td>
                        ${
                          one.job_id
                            ? html`
                                <a href=${link(["jobs", one.job_id])}>${names.get(one.job_id) ?? short(one.job_id)}</a>
                              `
                            : ""
                        }
                      </td>
                      <td class="num">${one.version ?? "–"}</td>
                      <td class="num">${lagWords(one.lag)}</td>
                      <td class="num">${number(one.outstanding)}</td>
                      <td class="num">${number(one.samples_total)}</td>
                      <td>${one.device}</td>
                    </tr>
                  `,
                )}
              <//>
            `
          : html`
              <${Empty}>No replica has registered.<//>
            `
      }
    </section>
  `;
}

const lagWords = (lag) => (lag === null || lag === undefined ? "–" : lag === 0 ? "current" : plural(lag, "version"));

function Trainers({ trainers }) {
  return html`
    <section class="card">
      <h2>Trainers</h2>
      ${
        trainers.length
          ? html`
              <${Table} label="Trainers" heads=${[["Job"], ["Step", 1], ["Phase"], ["Accelerator hours"]]}>
                ${trainers.map(
                  (one) => html`
                    <tr key=${one.id}>
                      <th scope="row"><a href=${link(["jobs", one.id])}>${one.name}</a></th>
                      <td class="num">${one.progress.step}</td>
                      <td>${phaseWords(one.progress)}</td>
                      <td>${hoursWords(one.accelerator_hours) ?? "–"}</td>
                    </tr>
                  `,
                )}
              <//>
            `
          : html`
              <p class="soft">No job trains now.</p>
            `
      }
    </section>
  `;
}

function Services({ fleet }) {
  const load = fleet.reward_load ?? {};
  const names = [...new Set([...Object.keys(fleet.rewards), ...Object.keys(load)])].sort();
  return html`
    <section class="card">
      <h2>Reward services</h2>
      ${
        names.length
          ? html`
              <${Table}
                label="Reward services"
                heads=${REWARD_HEADS}
              >
                ${names.map((name) => {
                  const one = load[name] ?? {};
                  const ready = fleet.rewards[name]?.length ?? 0;
                  const seconds = (value) => (value === null || value === undefined ? "–" : `${number(value)} s`);
                  return html`
                    <tr key=${name}>
                      <th scope="row">${name}</th>
                      <td class="num">
                        ${
                          ready ||
                          html`
                            <span class="badge bad">none</span>
                          `
                        }
                      </td>
                      <td class="num">${number(one.in_flight)}</td>
                      <td class="num">${number(one.calls)}</td>
                      <td class="num">${seconds(one.latency_p50_s)}</td>
                      <td class="num">${seconds(one.latency_p99_s)}</td>
                      <td class="num">${number(one.failures)}</td>
                    </tr>
                  `;
                })}
              <//>
            `
          : html`
              <p class="soft">This controller knows no reward service.</p>
            `
      }
    </section>
  `;
}
