// What one may ask of a job in its present state. Each button says what follows before it acts.

import { jobPath, post, withQuery } from "../../lib/api.js";
import { html } from "../../lib/html.js";
import { Act } from "../../parts/confirm.js";

const ENDED = new Set(["succeeded", "failed", "cancelled"]);

const PAUSING =
  "What runs now ends and nothing else starts. After a while the job is saved, and its trainer's devices go to " +
  "other jobs.";
const CANCELLING =
  "It stops for good: no last validation, no export, and it cannot resume. Checkpoints and samples that it has " +
  "written stay.";
const finishing = (left) =>
  `The ${left} steps that are left are not trained. The policy is validated, saved and exported as at the planned end.`;

export function Buttons({ job, done }) {
  if (ENDED.has(job.status) || job.desired === "cancelled") return null;
  const ask =
    (action, said, query = {}) =>
    async () => {
      await post(withQuery(jobPath(job.id, action), query));
      return said;
    };
  // One that paused for an outage and is wanted running resumes by itself; its user may hold it.
  const isHeld = job.status === "quarantined" || job.desired === "paused";
  const { step, steps } = job.progress;
  return html`
    ${
      isHeld
        ? html`
            <${Act}
              label="Resume"
              title=${`Resume ${job.name}?`}
              done=${done}
              act=${ask("resume", `${job.name} resumes.`)}
              follows="It queues before newer jobs, and continues from the step where it stopped."
            />
          `
        : html`
            <${Act}
              label="Pause"
              title=${`Pause ${job.name}?`}
              done=${done}
              act=${ask("pause", `${job.name} pauses.`)}
              follows=${PAUSING}
            />
          `
    }
    ${
      step > 0 &&
      html`
        <${Act}
          label="Finish"
          title=${`Finish ${job.name} after step ${step}?`}
          done=${done}
          act=${ask("finish", `${job.name} finishes.`)}
          follows=${finishing(steps - step)}
        />
      `
    }
    <${Act}
      label="Extend"
      title=${`Extend ${job.name}?`}
      done=${done}
      fields=${[{ name: "steps", label: "Training steps in all", type: "number", min: step + 1, defaultValue: steps }]}
      act=${async ({ steps: wanted }) => ask("extend", `${job.name} has ${wanted} steps now.`, { steps: wanted })()}
      follows=${`It has ${steps} steps and has done ${step}. With more it trains longer, with fewer it ends earlier.`}
    />
    <${Act}
      label="Cancel job"
      tone="bad"
      title=${`Cancel ${job.name}?`}
      done=${done}
      act=${ask("cancel", `${job.name} is being cancelled.`)}
      follows=${CANCELLING}
    />
  `;
}
