// One job: what it is and does, the buttons that steer it, and its tabs.

import { jobPath } from "../lib/api.js";
import { useEvent, useFetched, useFollowed, useResync, useThrottled } from "../lib/data.js";
import { duration, hoursWords, moment, number, phaseWords, short } from "../lib/format.js";
import { html, useEffect } from "../lib/html.js";
import { link } from "../lib/router.js";
import { Await, Meter, Status } from "../parts/states.js";
import { Buttons } from "./job/buttons.js";
import { Curves } from "./job/curves.js";
import { Gallery } from "./job/gallery.js";
import { Samples } from "./job/samples.js";
import { Settings } from "./job/settings.js";
import { Trace } from "./job/trace.js";
import { JobRewards } from "./rewards/job.js";

const TABS = [
  ["", "Curves", Curves],
  ["gallery", "Gallery", Gallery],
  ["samples", "Samples", Samples],
  ["rewards", "Rewards", JobRewards],
  ["settings", "Settings", Settings],
];

export function Job({ parts, query }) {
  const id = parts[1];
  const loaded = useFetched(jobPath(id));
  const soon = useThrottled(loaded.reload, 500);
  useFollowed(id);
  useEvent("jobs", ({ items }) => items.some((job) => job.id === id) && soon());
  useEvent("event", soon);
  useResync(soon);
  return html`
    <${Await} of=${{ ...loaded, stale: loaded.stale?.id === id ? loaded.stale : null }} what="the job">
      ${(job) => html`
        <${Loaded} ...${{ job, parts, query, reload: loaded.reload }} />
      `}
    <//>
  `;
}

function Loaded({ job, parts, query, reload }) {
  const [, , tab = "", ...place] = parts;
  useEffect(() => {
    document.title = `${job.name} · Flowfleet`;
    return () => (document.title = "Flowfleet");
  }, [job.name]);
  const [, , View] = TABS.find(([path]) => path === tab) ?? TABS[0];
  const isTrace = tab === "samples" && place.length === 3;
  return html`
    <div class="head job-head">
      <p class="crumbs">
        <a href=${link(["jobs"])}>Jobs</a>
        ${" / "}
        <code title=${job.id}>${short(job.id)}</code>
      </p>
      <h1>${job.name}</h1>
      <${Status} of=${job.status} desired=${job.desired} />
      <div class="row end"><${Buttons} job=${job} done=${reload} /></div>
    </div>
    <${Facts} job=${job} />
    ${
      job.reason &&
      html`
        <p class=${`notice ${job.status === "failed" || job.status === "quarantined" ? "bad" : ""}`}>${job.reason}</p>
      `
    }
    ${[...(job.warnings ?? []), job.progress.warning].filter(Boolean).map(
      (text) => html`
        <p class="notice">${text}</p>
      `,
    )}
    <nav class="tabs" aria-label="Parts of the job">
      ${TABS.map(
        ([path, title]) => html`
          <a href=${link(["jobs", job.id, path].filter(Boolean))} aria-current=${path === tab ? "page" : undefined}>
            ${title}
          </a>
        `,
      )}
      ${
        takesVotes(job) &&
        html`
          <a href=${link(["vote", job.id])}>Vote</a>
        `
      }
    </nav>
    ${
      isTrace
        ? html`
            <${Trace} ...${{ job, place, query }} />
          `
        : html`
            <${View} ...${{ job, query }} />
          `
    }
  `;
}

/** Whether people's votes are one of the job's rewards. */
const takesVotes = (job) => Object.entries(job.rewards.active.rewards).some(([name, part]) => (part.service ?? name) === "human");

function Facts({ job }) {
  const { progress } = job;
  const facts = [
    [
      "Steps",
      html`
        ${progress.step} of ${progress.steps}
        <${Meter} value=${progress.step} of=${progress.steps} label="Share of the steps" />
      `,
    ],
    ["Now", (!job.ended_at && phaseWords(progress)) || null],
    ["Reward", number(progress.reward)],
    ["Held out", number(progress.held_out_reward)],
    ["Left", !job.ended_at && progress.eta_s ? duration(progress.eta_s) : null],
    [
      "Dropped",
      Object.entries(progress.samples_dropped ?? {})
        .map(([why, count]) => `${count} ${why}`)
        .join(", ") || null,
    ],
    ["Accelerator hours", hoursWords(job.accelerator_hours)],
    ["Owner", job.owner || null],
    ["Started", moment(job.started_at ?? job.created_at)],
    ["Ended", job.ended_at ? moment(job.ended_at) : null],
  ];
  return html`
    <dl class="facts">
      ${facts
        .filter(([, value]) => value !== null)
        .map(
          ([name, value]) => html`
            <div>
              <dt>${name}</dt>
              <dd>${value}</dd>
            </div>
          `,
        )}
    </dl>
  `;
}
