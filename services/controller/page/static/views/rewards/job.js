// The rewards of one job: what is active, what is pending, how shadows compare, where rewards disagree, what changed.

import { jobPath, patch } from "../../lib/api.js";
import { useEvent, useFetched, useResync, useThrottled } from "../../lib/data.js";
import { moment, number, plural } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Act } from "../../parts/confirm.js";
import { Await } from "../../parts/states.js";
import { Disagreement } from "./disagreement.js";

const ENDED = new Set(["succeeded", "failed", "cancelled"]);

export function JobRewards({ job }) {
  const loaded = useFetched(jobPath(job.id, "rewards"));
  const soon = useThrottled(loaded.reload, 1000);
  useEvent("event", ({ type }) => ["trained", "validation", "request", "rewards"].includes(type) && soon());
  useResync(soon);
  return html`
    <${Await} of=${loaded} what="rewards">
      ${(rewards) => html`
        ${
          rewards.pending &&
          html`
            <p class="notice">
              Requested: ${rewards.pending.changes.join("; ")}. It takes effect with the next step that opens.
            </p>
          `
        }
        <${Active} rewards=${rewards.active.rewards} />
        <${Shadows} ...${{ job, rewards, done: loaded.reload }} />
        <${Disagreement} job=${job} />
        <${History} rewards=${rewards} />
      `}
    <//>
  `;
}

const SHADOWING =
  "It scores the same samples as the reward next to it, from the next step that opens. Training does not see its " +
  "scores. It costs its service as much as a reward.";

const promoting = (name, beside) =>
  `From the next step that opens, ${beside} is scored by ${name}'s service and params. Its name, weight and gate ` +
  "stay, so its curve continues.";

const gateWords = (gate) => (gate ? `below ${number(gate.below)}: ${gate.action}` : "");

function Active({ rewards }) {
  return html`
    <section class="card">
      <h2>Active</h2>
      <div class="scroll" tabindex="0" role="region" aria-label="Active rewards">
        <table class="grid">
          <thead>
            <tr>
              <th scope="col">Reward</th>
              <th scope="col" class="num">Weight</th>
              <th scope="col">Gate</th>
              <th scope="col">Service</th>
              <th scope="col">When it fails</th>
            </tr>
          </thead>
          <tbody>
            ${Object.entries(rewards).map(
              ([name, part]) => html`
                <tr key=${name}>
                  <th scope="row">${name}</th>
                  <td class="num">
                    ${
                      part.weight
                        ? number(part.weight)
                        : html`
                            <span class="soft">${part.held_out_only ? "watches validations" : "watches"}</span>
                          `
                    }
                  </td>
                  <td>${gateWords(part.gate)}</td>
                  <td>${part.service ?? name}</td>
                  <td>${part.on_failure ?? ""}</td>
                </tr>
              `,
            )}
          </tbody>
        </table>
      </div>
    </section>
  `;
}

function Shadows({ job, rewards, done }) {
  const shadows = Object.entries(rewards.comparison);
  const names = Object.keys(rewards.active.rewards);
  const change = async (body, said) => {
    await patch(jobPath(job.id, "rewards"), { revision: rewards.revision, ...body });
    return said;
  };
  const add = ({ name, beside, service }) =>
    change({ shadow: { [name]: { for: beside, service } } }, `${name} shadows ${beside} from the next step.`);
  const isOpen = !ENDED.has(job.status);
  return html`
    <section class="card">
      <div class="row">
        <h2>Shadows</h2>
        <span class="soft">score with a reward and change nothing</span>
        <div class="row end">
          ${
            isOpen &&
            html`
              <${Act}
                label="Add a shadow"
                title="Add a shadow?"
                done=${done}
                follows=${SHADOWING}
                fields=${[
                  { name: "name", label: "Name", pattern: "[A-Za-z0-9._\\-]{1,64}" },
                  { name: "beside", label: "Next to the reward", options: names },
                  { name: "service", label: "Reward service", type: "text" },
                ]}
                act=${add}
              />
            `
          }
        </div>
      </div>
      ${
        shadows.length
          ? html`
              <div class="scroll" tabindex="0" role="region" aria-label="Shadows">
                <table class="grid">
                  <thead>
                    <tr>
                      <th scope="col">Shadow</th>
                      <th scope="col">Next to</th>
                      <th scope="col" class="num">Rank correlation</th>
                      <th scope="col" class="num">Same order of pairs</th>
                      <th scope="col" class="num">Held out</th>
                      <th scope="col" class="num">Scored</th>
                      <th scope="col" class="num">Failed</th>
                      <th scope="col"><span class="hidden">Buttons</span></th>
                    </tr>
                  </thead>
                  <tbody>
                    ${shadows.map(
                      ([name, one]) => html`
                        <tr key=${name}>
                          <th scope="row">${name}</th>
                          <td>${one.beside}</td>
                          <td class="num">${number(one.train.spearman)}</td>
                          <td class="num">${number(one.train.agreement)}</td>
                          <td class="num">${number(one.held_out.spearman)}</td>
                          <td class="num">${number(one.scored)}</td>
                          <td class="num">${number(one.failed)}</td>
                          <td class="row end">
                            ${
                              isOpen &&
                              html`
                                <${Act}
                                  label="Promote"
                                  title=${`Promote ${name}?`}
                                  done=${done}
                                  act=${() => change({ promote: [name] }, `${name} replaces ${one.beside}.`)}
                                  follows=${promoting(name, one.beside)}
                                />
                                <${Act}
                                  label="Remove"
                                  title=${`Remove the shadow ${name}?`}
                                  done=${done}
                                  act=${() => change({ remove: [name] }, `${name} is removed.`)}
                                  follows="It stops scoring. The scores that it gave stay with their samples."
                                />
                              `
                            }
                          </td>
                        </tr>
                      `,
                    )}
                  </tbody>
                </table>
              </div>
            `
          : html`
              <p class="soft">None.</p>
            `
      }
    </section>
  `;
}

function History({ rewards }) {
  return html`
    <section class="card">
      <h2>History</h2>
      <ol class="history">
        ${[...rewards.history].reverse().map(
          (one) => html`
            <li key=${one.number}>
              <b>Revision ${one.number}</b>
              ${" "}
              <span class="soft">from step ${one.from_step ?? 0}, ${moment(one.applied_at ?? one.requested_at)}</span>
              <div>
                ${one.changes.join("; ") || `as submitted: ${plural(Object.keys(one.rewards).length, "reward")}`}
              </div>
            </li>
          `,
        )}
      </ol>
    </section>
  `;
}
