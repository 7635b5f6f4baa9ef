// The phases of the last steps as bars on one scale of seconds.

import { duration, phaseName } from "../../lib/format.js";
import { html } from "../../lib/html.js";

const STEPS = 20;
const PHASES = ["rollout", "score", "advantage", "train", "publish", "checkpoint", "validate"];
const TIMINGS = { rollout: "gen", score: "reward", advantage: "adv", train: "train", publish: "update_weights" };

export function Timeline({ job, rows }) {
  const timed = rows.filter(({ values }) => values["timing_s/step"]);
  const steps = timed.slice(-STEPS).reverse().map(stepOf);
  if (!steps.length) return null;
  const length = (step) => step.phases.reduce((sum, { seconds }) => sum + seconds, 0);
  const longest = Math.max(...steps.map(length)) || 1;
  const present = [...PHASES, ...other(steps)].filter((phase) =>
    steps.some((step) => step.phases.some((one) => one.phase === phase)),
  );
  return html`
    <section class="card timeline" aria-labelledby="timeline">
      <h2 id="timeline">Phases of the last ${steps.length} steps</h2>
      <ul class="legend">
        ${present.map(
          (phase) => html`
            <li>
              <i class=${`block ${shade(phase)}`} aria-hidden="true"></i>
              ${phaseName(phase)}
            </li>
          `,
        )}
      </ul>
      <ol class="bars">
        ${steps.map(
          (step) => html`
            <li key=${step.step}>
              <span class="step">${linked(job, step.step)}</span>
              <span class="bar" role="img" aria-label=${`Step ${step.step}: ${words(step)}`} title=${words(step)}>
                ${step.phases.map(
                  ({ phase, seconds }) => html`
                    <i class=${`block ${shade(phase)}`} style=${{ width: `${(100 * seconds) / longest}%` }}></i>
                  `,
                )}
              </span>
              <span class="seconds">${duration(length(step))}</span>
            </li>
          `,
        )}
      </ol>
    </section>
  `;
}

function stepOf({ step, values }) {
  const found = Object.entries(TIMINGS).map(([phase, name]) => ({ phase, seconds: values[`timing_s/${name}`] ?? 0 }));
  return { step, phases: found.filter(({ seconds }) => seconds > 0) };
}

/** Where the operator's tool shows the calls of a step. */
export const spansOf = (job, step) => job.trace_url.replace("{step}", step);

const linked = (job, step) =>
  job.trace_url
    ? html`
        <a href=${spansOf(job, step)} target="_blank" rel="noopener">${step}</a>
      `
    : step;

const other = (steps) =>
  [...new Set(steps.flatMap((step) => step.phases.map(({ phase }) => phase)))].filter(
    (phase) => !PHASES.includes(phase),
  );
const shade = (phase) => `p${Math.max(0, PHASES.indexOf(phase))}`;
const words = (step) => step.phases.map(({ phase, seconds }) => `${phaseName(phase)} ${duration(seconds)}`).join(", ");
