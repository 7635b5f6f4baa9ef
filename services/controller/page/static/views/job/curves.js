// Live curves of a job, alone or with others; the signs of a hacked reward; the phases of the last steps.

import { all, get, jobPath } from "../../lib/api.js";
import { useEvent, useFetched, useLoaded, useResync, useThrottled } from "../../lib/data.js";
import { number, plural } from "../../lib/format.js";
import { html, useMemo, useRef } from "../../lib/html.js";
import { go, link } from "../../lib/router.js";
import { breaksOf, linesOf, panels, rewardNames } from "../../lib/series.js";
import { signs } from "../../lib/signs.js";
import { Chart } from "../../parts/chart.js";
import { Await, Empty } from "../../parts/states.js";
import { Profiles } from "./profiles.js";
import { Timeline } from "./timeline.js";

export function Curves({ job, query }) {
  const others = (query.with ?? "").split(",").filter(Boolean);
  const own = useRows(job.id);
  const changed = useFetched(jobPath(job.id, "rewards"));
  useEvent("event", ({ type }) => type === "rewards" && changed.reload());
  const beside = useLoaded((signal) => Promise.all(others.map((id) => withRows(id, signal))), [others.join()]);
  return html`
    <${Beside} ...${{ job, others }} />
    <${Await} of=${own} what="curves">
      ${(rows) => html`
        <${Panels} ...${{ job, rows, beside: beside.data ?? [], breaks: breaksOf((changed.data ?? changed.stale)?.history) }} />
      `}
    <//>
    ${
      !others.length &&
      html`
        <${Timeline} job=${job} rows=${own.data ?? own.stale ?? []} />
        <${Profiles} job=${job} />
      `
    }
  `;
}

async function withRows(id, signal) {
  const [job, rows] = await Promise.all([get(jobPath(id), signal), all(jobPath(id, "metrics"), {}, signal)]);
  return { ...job, rows };
}

/** All rows of a job. New steps are added as they come; the last few are read again, because a validation adds to a
 * row that was there. */
function useRows(id) {
  const kept = useRef({ id: null, rows: [] });
  const loaded = useLoaded(
    async (signal) => {
      const before = kept.current.id === id ? kept.current.rows.slice(0, -10) : [];
      const fresh = await all(jobPath(id, "metrics"), { cursor: before.at(-1)?.step }, signal);
      kept.current = { id, rows: [...before, ...fresh] };
      return kept.current.rows;
    },
    [id],
  );
  const soon = useThrottled(loaded.reload, 500);
  useEvent("event", ({ type }) => (type === "trained" || type === "validation") && soon());
  useResync(soon);
  return loaded;
}

/** Which jobs share the charts. */
function Beside({ job, others }) {
  const list = useFetched("/v1/overview?limit=200");
  const jobs = list.data?.items ?? [];
  const show = (ids) => go(link(["jobs", job.id], { with: ids.join(",") }));
  const named = (id) => jobs.find((one) => one.id === id)?.name ?? id.slice(0, 13);
  const free = jobs.filter(({ id }) => id !== job.id && !others.includes(id));
  if (!free.length && !others.length) return null;
  return html`
    <div class="row beside">
      ${
        others.length > 0 &&
        html`
          <span class="chip">
            <i class="swatch c0 solid" aria-hidden="true"></i>
            ${job.name}
          </span>
        `
      }
      ${others.map(
        (id, at) => html`
          <span class="chip">
            <i class=${`swatch c${(at + 1) % 8} solid`} aria-hidden="true"></i>
            <a href=${link(["jobs", id])}>${named(id)}</a>
            <button
              type="button"
              class="quiet"
              aria-label=${`Leave out ${named(id)}`}
              onClick=${() => show(others.filter((one) => one !== id))}
            >
              ×
            </button>
          </span>
        `,
      )}
      <label class="inline">
        Compare with
        <select value="" onChange=${(event) => event.target.value && show([...others, event.target.value])}>
          <option value="">a job …</option>
          ${free.map(
            ({ id, name }) => html`
              <option value=${id}>${name} · ${id.slice(0, 13)}</option>
            `,
          )}
        </select>
      </label>
    </div>
  `;
}

function Panels({ job, rows, beside, breaks }) {
  const jobs = useMemo(() => [{ ...job, rows }, ...beside], [job.id, rows, beside]);
  const names = [...new Set(jobs.flatMap((one) => rewardNames(one, one.rows)))];
  const drawn = useMemo(
    () =>
      panels(names)
        .map((panel) => ({ ...panel, lines: linesOf(panel, jobs) }))
        .filter(({ lines }) => lines.length),
    [jobs, names.join()],
  );
  const steps = jobs
    .flatMap((one) => [one.rows.at(0)?.step, one.rows.at(-1)?.step])
    .filter((step) => step !== undefined);
  if (!steps.length)
    return html`
      <${Empty}>No step is trained yet: the curves begin with the first.<//>
    `;
  const range = [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)];
  const open = (by) => (line, step) =>
    go(link(["jobs", line.job, "samples"], { purpose: line.kind, step, by, order: by ? "best" : undefined }));
  return html`
    ${jobs.map(
      (one) => html`
        <${Signs} key=${one.id} job=${one} isNamed=${jobs.length > 1} />
      `,
    )}
    <div class="charts">
      ${drawn.map(
        (panel) => html`
          <${Chart}
            key=${panel.title}
            ...${panel}
            range=${range}
            breaks=${panel.isTotal ? breaks : []}
            open=${open(panel.by)}
          />
        `,
      )}
    </div>
  `;
}

function Signs({ job, isNamed }) {
  const found = useMemo(() => signs(job.rows, job.rewards?.active?.rewards ?? {}), [job.rows]);
  if (!found.length) return null;
  return html`
    <section class="notice warn" aria-label="Signs of a hacked reward">
      <p>
        <b>
          ${isNamed ? `${job.name}: the` : "The"} reward rises while${" "}
          ${plural(found.length, "measure falls", "measures fall")}.
        </b>
        ${" "}Look at the samples before and after:
      </p>
      <ul>
        ${found.map(
          (sign) => html`
            <li>
              <b>${sign.name}</b>
              ${" "}falls from ${number(sign.from)} to ${number(sign.to)}, since${" "}
              ${sign.purpose === "validate" ? "version" : "step"} ${sign.since}.${" "}
              <a
                href=${samplesOf(job, sign)}
              >
                Samples from there
              </a>
            </li>
          `,
        )}
      </ul>
      <p><a href=${link(["jobs", job.id, "gallery"])}>Compare versions in the gallery</a></p>
    </section>
  `;
}

/** The samples where a fall begins, the lowest first. */
function samplesOf(job, { purpose, since, by }) {
  return link(["jobs", job.id, "samples"], { purpose, step: since, by, order: by ? "worst" : undefined });
}
