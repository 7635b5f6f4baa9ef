// All jobs, newest first: what each does, why it waits, how its reward goes, and where one should look.

import { all, get, jobPath } from "../lib/api.js";
import { useEvent, useFetched, useLoaded, useResync, useThrottled } from "../lib/data.js";
import { ago, duration, number, phaseWords, plural, short } from "../lib/format.js";
import { html, useEffect, useMemo, useState } from "../lib/html.js";
import { go, link } from "../lib/router.js";
import { signMetrics, signs } from "../lib/signs.js";
import { Sparkline } from "../parts/sparkline.js";
import { Await, Empty, Meter, Status } from "../parts/states.js";
import { WindowRows } from "../parts/virtual.js";
import { SweepRow, folded } from "./sweep.js";

const ENDED = new Set(["succeeded", "failed", "cancelled"]);
const ROW = 66;
const FIRST = 60;
const FILTERS = { all: () => true, "at work": (job) => !ENDED.has(job.status), ended: (job) => ENDED.has(job.status) };

export function Jobs() {
  const loaded = useFetched(`/v1/overview?limit=${FIRST}`);
  const cursor = (loaded.data ?? loaded.stale)?.next_cursor ?? null;
  const rest = async (signal) => (cursor ? all("/v1/overview", { cursor }, signal) : []);
  const older = useLoaded(rest, [cursor]);
  const [changed, setChanged] = useState(new Map());
  const again = useThrottled(loaded.reload, 1000);
  useEvent("jobs", ({ items }) => setChanged((before) => new Map([...before, ...items.map((job) => [job.id, job])])));
  useResync(() => {
    setChanged(new Map());
    again();
  });
  return html`
    <${Await} of=${loaded} what="jobs">
      ${({ items }) => html`
        <${List} jobs=${merged([...items, ...(older.data ?? older.stale ?? [])], changed)} />
      `}
    <//>
  `;
}

/** Rows as last heard of; jobs that are newer than all of them come first. */
function merged(jobs, changed) {
  const newest = jobs[0]?.id ?? "";
  const fresh = [...changed.values()].filter(({ id }) => id > newest);
  return [...fresh.sort((a, b) => (a.id < b.id ? 1 : -1)), ...jobs.map((job) => changed.get(job.id) ?? job)];
}

function List({ jobs }) {
  const [words, setWords] = useState("");
  const [kind, setKind] = useState("all");
  const [picked, setPicked] = useState(new Set());
  const shown = useMemo(() => {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const parts = (job) => [job.name, job.id, job.owner, job.status, job.pool, job.algorithm, job.sweep?.name];
    const text = (job) => parts(job).join(" ").toLowerCase();
    return folded(jobs.filter((job) => FILTERS[kind](job) && wanted.every((word) => text(job).includes(word))));
  }, [jobs, words, kind]);
  const pick = (id) =>
    setPicked((before) =>
      before.has(id) ? new Set([...before].filter((one) => one !== id)) : new Set([...before, id]),
    );
  const working = jobs.filter(({ status }) => !ENDED.has(status)).length;
  const [first, ...others] = picked;
  return html`
    <div class="head">
      <h1>Jobs</h1>
      <span class="soft">${plural(jobs.length, "job")}, ${working} at work</span>
      <div class="row end">
        <div class="segments" role="group" aria-label="Which jobs">
          ${Object.keys(FILTERS).map(
            (name) => html`
              <button type="button" aria-pressed=${name === kind} onClick=${() => setKind(name)}>${name}</button>
            `,
          )}
        </div>
        <input
          type="search"
          placeholder="Name, owner, pool …"
          aria-label="Filter jobs"
          value=${words}
          onInput=${(event) => setWords(event.target.value)}
        />
        <button
          type="button"
          class="primary"
          disabled=${picked.size < 2}
          onClick=${() => go(link(["jobs", first], { with: others.join(",") }))}
        >
          Compare${picked.size ? ` ${picked.size}` : ""}
        </button>
      </div>
    </div>
    ${
      shown.length
        ? html`
            <div class="jobs" role="table" aria-label="Jobs" aria-rowcount=${shown.length + 1}>
              <div role="rowgroup">
                <div role="row" class="job-row heads" aria-rowindex="1">
                  ${["", "Job", "State", "Reward", "Held out", "Steps", "Started"].map(
                    (title) => html`
                      <span role="columnheader">
                        ${
                          title ||
                          html`
                            <span class="hidden">Compare</span>
                          `
                        }
                      </span>
                    `,
                  )}
                </div>
              </div>
              <${WindowRows}
                items=${shown}
                size=${ROW}
                role="rowgroup"
                row=${(job, index, style) =>
                  job.jobs
                    ? html`
                        <${SweepRow} key=${job.id} ...${job} ...${{ index, style }} />
                      `
                    : html`
                        <${Row} key=${job.id} ...${{ job, index, style, isPicked: picked.has(job.id), pick }} />
                      `}
              />
            </div>
          `
        : html`
            <${Empty}>
              ${
                jobs.length
                  ? "No job fits the filter."
                  : html`
                      No job yet: submit one with${" "}
                      <code>flowfleet submit JOB.toml</code>
                      .
                    `
              }
            <//>
          `
    }
  `;
}

function Row({ job, index, style, isPicked, pick }) {
  const { progress } = job;
  const words = stateWords(job);
  return html`
    <div role="row" class="job-row" style=${style} aria-rowindex=${index + 2}>
      <span role="cell">
        <input type="checkbox" aria-label=${`Compare ${job.name}`} checked=${isPicked} onChange=${() => pick(job.id)} />
      </span>
      <span role="cell" class="name">
        <a href=${link(["jobs", job.id])}>${job.name}</a>
        <small>${[job.owner, short(job.id)].filter(Boolean).join(" · ")}</small>
      </span>
      <span role="cell" class="state">
        <span>
          <${Status} of=${job.status} desired=${job.desired} />
          ${
            job.place > 0 &&
            html`
              <small>${plural(job.place, "job")} before it</small>
            `
          }
          <${Sign} job=${job} />
        </span>
        <small title=${words}>${words}</small>
      </span>
      <span role="cell" class="curve">
        <${Sparkline} ...${curveOf(job)} />
        <b>${number(progress.reward)}</b>
      </span>
      <span role="cell" class="figure">${number(progress.held_out_reward)}</span>
      <span role="cell" class="steps">
        <span>
          ${progress.step} of ${progress.steps}${" "}
          <small>${left(job)}</small>
        </span>
        <${Meter} value=${progress.step} of=${progress.steps} label=${`${progress.step} of ${progress.steps} steps`} />
      </span>
      <span role="cell" class="when"><small>${ago(job.started_at ?? job.created_at)}</small></span>
    </div>
  `;
}

const left = ({ status, progress }) => (!ENDED.has(status) && progress.eta_s ? `${duration(progress.eta_s)} left` : "");

/** Its training reward, apart where other rewards make up the total. */
function curveOf({ curve, progress }) {
  const changed = progress.rewards_changed ?? [];
  const words = changed.length ? `Training reward; rewards changed at step ${changed.join(", ")}` : "Training reward";
  return { values: curve?.values ?? [], label: words, breaks: changed.map((step) => step / (curve?.stride ?? 1)) };
}

/** Why it waits, else what it does, else why it ended. */
function stateWords(job) {
  if (job.waits) return job.waits;
  const words = ENDED.has(job.status) ? job.reason : phaseWords(job.progress) || job.reason;
  return [words, job.progress.warning].filter(Boolean).join(" · ");
}

/** A mark where something falls while the reward rises. */
function Sign({ job }) {
  const [found, setFound] = useState([]);
  useEffect(() => {
    if (job.progress.step < 4 || job.status === "failed") return undefined;
    const abort = new AbortController();
    look(job, abort.signal).then(setFound, () => {});
    return () => abort.abort();
  }, [job.id, job.progress.step]);
  if (!found.length) return null;
  const [first] = found;
  return html`
    <a
      class="badge warn"
      href=${link(["jobs", job.id])}
      title=${`${first.name} falls from ${number(first.from)} to ${number(first.to)} while the reward rises`}
    >
      ${first.name} falls since ${first.since}
    </a>
  `;
}

async function look(job, signal) {
  const { active } = await get(jobPath(job.id, "rewards"), signal);
  const names = signMetrics(active.rewards).join(",");
  const rows = await all(jobPath(job.id, "metrics"), { names }, signal);
  return signs(rows, active.rewards);
}
