// Held-out prompts as rows, versions of the policy as columns, newest first. Only what is in sight exists. Arrow keys
// move from cell to cell; Enter opens a sample, C compares two versions of its prompt.

import { all, get, jobPath } from "../../lib/api.js";
import { useEvent, useLoaded, useThrottled } from "../../lib/data.js";
import { plural } from "../../lib/format.js";
import { html, useState } from "../../lib/html.js";
import { Await, Empty } from "../../parts/states.js";
import { Compare } from "./compare.js";
import { Grid } from "./grid.js";

const SIZES = { small: 96, medium: 144, large: 232 };
const PLAIN = matchMedia("(max-width: 640px)").matches ? "small" : "medium";

export function Gallery({ job }) {
  const loaded = useLoaded((signal) => shape(job.id, signal), [job.id]);
  const soon = useThrottled(loaded.reload, 1000);
  useEvent("event", ({ type }) => type === "validation" && soon());
  return html`
    <${Await} of=${loaded} what="validations">
      ${(found) =>
        found.first
          ? html`
              <${Shown} ...${{ job, ...found }} />
            `
          : html`
              <${Empty}>
                No validation yet: with
                <code>schedule.validate_every</code>
                each one adds a column.
              <//>
            `}
    <//>
  `;
}

/** Versions, newest first, the number of prompts, and a sample that shows how media are addressed. */
async function shape(id, signal) {
  const [rows, newest] = await Promise.all([
    all(jobPath(id, "metrics"), { names: "val/reward" }, signal),
    get(jobPath(id, "samples?purpose=validate&order=newest&limit=1"), signal),
  ]);
  const validated = rows.filter(({ values }) => "val/reward" in values);
  const versions = validated.map(({ step }) => step).reverse();
  const [last] = newest.items;
  if (last && !versions.includes(last.step)) versions.unshift(last.step);
  return { versions, first: last, prompts: last ? last.group + 1 : 0 };
}

function Shown({ job, versions, first, prompts }) {
  const [size, setSize] = useState(PLAIN);
  const [compared, setCompared] = useState(null);
  return html`
    <div class="row controls">
      <span class="soft">${plural(prompts, "prompt")}, ${plural(versions.length, "version")}, newest first</span>
      <div class="segments" role="group" aria-label="Size of the cells">
        ${Object.keys(SIZES).map(
          (name) => html`
            <button type="button" aria-pressed=${name === size} onClick=${() => setSize(name)}>${name}</button>
          `,
        )}
      </div>
      <button
        type="button"
        disabled=${versions.length < 2}
        onClick=${() => setCompared({ group: 0, version: versions[0] })}
      >
        Before and after
      </button>
      <span class="soft keys">
        <kbd>←</kbd>
        <kbd>↑</kbd>
        <kbd>↓</kbd>
        <kbd>→</kbd>
        move
        <kbd>Enter</kbd>
        open
        <kbd>C</kbd>
        compare
      </span>
    </div>
    <${Grid} key=${size} ...${{ job, versions, prompts, first, size: SIZES[size], compare: setCompared }} />
    ${
      compared &&
      html`
        <${Compare} ...${{ job, versions, prompts, first, ...compared, close: () => setCompared(null) }} />
      `
    }
  `;
}
