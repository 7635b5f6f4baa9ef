// Training or held-out samples as cards: the newest step first, one a prompt; or those behind a point of a curve.

import { get, jobPath, withQuery } from "../../lib/api.js";
import { useEvent, useLoaded, useThrottled } from "../../lib/data.js";
import { number } from "../../lib/format.js";
import { classes, html, useEffect, useMemo, useState } from "../../lib/html.js";
import { go, link } from "../../lib/router.js";
import { Media } from "../../parts/media.js";
import { Name } from "../../parts/name.js";
import { Await, Empty } from "../../parts/states.js";

const PAGE = 60;
const ORDERS = { newest: "newest first", oldest: "oldest first", best: "highest first", worst: "lowest first" };

export function Samples({ job, query }) {
  const { purpose = "train", step, by, order = "newest" } = query;
  const ranked = order === "best" || order === "worst";
  const each = query.each ?? (ranked ? "" : "group");
  const asked = { purpose, step, order, by: ranked && step ? by : undefined, each: ranked ? "" : each, limit: PAGE };
  const [more, setMore] = useState({ items: [], cursor: null, key: "" });
  const key = JSON.stringify(asked);
  const loaded = useLoaded((signal) => get(withQuery(jobPath(job.id, "samples"), asked), signal), [job.id, key]);
  useEffect(() => setMore({ items: [], cursor: null, key }), [key, loaded.data]);
  const soon = useThrottled(loaded.reload, 2000);
  useEvent("event", ({ type }) => type === "trained" && !step && !more.items.length && soon());
  const extra = more.key === key ? more : { items: [], cursor: null };
  const next = extra.items.length ? extra.cursor : loaded.data?.next_cursor;
  const grow = async () => {
    const page = await get(withQuery(jobPath(job.id, "samples"), { ...asked, cursor: next }));
    setMore({ items: [...extra.items, ...page.items], cursor: page.next_cursor, key });
  };
  const change = (changes) => go(link(["jobs", job.id, "samples"], { ...query, ...changes }), true);
  return html`
    <${Controls} ...${{ job, purpose, step, by, order, each, ranked, change }} />
    <${Await} of=${loaded} what="samples">
      ${(page) => html`
        <${Cards} ...${{ job, items: [...page.items, ...extra.items], by }} />
        ${
          next &&
          html`
            <div class="row"><button type="button" onClick=${grow}>More samples</button></div>
          `
        }
      `}
    <//>
  `;
}

function Controls({ job, purpose, step, by, order, each, ranked, change }) {
  const names = Object.keys(job.rewards?.active?.rewards ?? {});
  const what = purpose === "train" ? "Step" : "Version";
  return html`
    <div class="row controls">
      <div class="segments" role="group" aria-label="Which samples">
        <button
          type="button"
          aria-pressed=${purpose === "train"}
          onClick=${() => change({ purpose: "train", step: undefined })}
        >
          training
        </button>
        <button
          type="button"
          aria-pressed=${purpose !== "train"}
          onClick=${() => change({ purpose: "validate", step: undefined })}
        >
          held out
        </button>
      </div>
      <label class="inline">
        ${what}
        <input
          type="number"
          min="0"
          class="narrow"
          placeholder="newest"
          value=${step ?? ""}
          onChange=${(event) => change({ step: event.target.value })}
        />
      </label>
      ${
        step !== undefined &&
        html`
          <span class="segments">
            <button
              type="button"
              aria-label=${`${what} before`}
              disabled=${step <= 0}
              onClick=${() => change({ step: Number(step) - 1 })}
            >
              ‹
            </button>
            <button type="button" aria-label=${`${what} after`} onClick=${() => change({ step: Number(step) + 1 })}>
              ›
            </button>
          </span>
        `
      }
      <label class="inline">
        Order
        <select value=${order} onChange=${(event) => change({ order: event.target.value })}>
          ${Object.entries(ORDERS).map(
            ([name, words]) => html`
              <option value=${name} selected=${name === order}>${words}</option>
            `,
          )}
        </select>
      </label>
      ${
        ranked &&
        step !== undefined &&
        html`
          <label class="inline">
            by
            <select value=${by ?? ""} onChange=${(event) => change({ by: event.target.value })}>
              <option value="">the reward</option>
              ${names.map(
                (name) => html`
                  <option value=${name} selected=${name === by}>${name}</option>
                `,
              )}
            </select>
          </label>
        `
      }
      ${
        !ranked &&
        html`
          <label class="inline">
            <input
              type="checkbox"
              checked=${each === "group"}
              onChange=${(event) => change({ each: event.target.checked ? "group" : "all" })}
            />
            one a prompt
          </label>
        `
      }
    </div>
  `;
}

export const tracePlace = (job, sample) =>
  link(["jobs", job.id, "samples", String(sample.step), String(sample.group), String(sample.index)], {
    purpose: sample.purpose === "train" ? undefined : sample.purpose,
  });

function Cards({ job, items, by }) {
  const steps = useMemo(() => bySteps(items), [items]);
  if (!items.length)
    return html`
      <${Empty}>No samples here yet.<//>
    `;
  return steps.map(
    ([title, samples]) => html`
      <section key=${title}>
        <h2 class="step-title">${title}</h2>
        <ul class="cards">
          ${samples.map(
            (sample) => html`
              <${Card} key=${`${sample.group}/${sample.index}`} ...${{ job, sample, by }} />
            `,
          )}
        </ul>
      </section>
    `,
  );
}

/** Runs of samples of one step, in the order in which they came. */
function bySteps(items) {
  const runs = [];
  for (const sample of items) {
    const title = `${sample.purpose === "train" ? "Step" : "Version"} ${sample.step}`;
    if (runs.at(-1)?.[0] !== title) runs.push([title, []]);
    runs.at(-1)[1].push(sample);
  }
  return runs;
}

export const Score = ({ name, value, isChosen = false }) => html`
  <span class=${classes("score-line", isChosen && "chosen")}>
    <span><${Name} of=${name} /></span>
    <span>${number(value)}</span>
  </span>
`;

function Card({ job, sample, by }) {
  const scores = Object.entries(sample.scores).filter(([name]) => !name.includes("."));
  return html`
    <li class="sample">
      <a href=${tracePlace(job, sample)}>
        <${Media} sample=${sample} />
        <span class="prompt">${sample.prompt}</span>
        <span class="scores">
          <b>${sample.reward === null ? "no reward" : number(sample.reward)}</b>
          ${scores.map(
            ([name, value]) => html`
              <${Score} ...${{ name, value, isChosen: name === by }} />
            `,
          )}
        </span>
        ${
          (sample.drop_reason || sample.gated_by) &&
          html`
            <span class="badge warn" title=${sample.drop_cause}>${sample.drop_reason || `gated by ${sample.gated_by}`}</span>
          `
        }
      </a>
    </li>
  `;
}
