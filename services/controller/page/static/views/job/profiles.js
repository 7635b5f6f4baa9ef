// Profiled steps: their largest costs, and their traces to download.

import { jobPath } from "../../lib/api.js";
import { useFetched } from "../../lib/data.js";
import { html } from "../../lib/html.js";

export function Profiles({ job }) {
  const found = useFetched(jobPath(job.id, "profiles"));
  const items = found.data ?? found.stale ?? [];
  return items.map(
    ({ step, of, on_device, costs, files }) => html`
      <details class="card" key=${`${step}-${of}`}>
        <summary>Profile of ${of === "trainer" ? "step" : "sampling for step"} ${step}</summary>
        <table class="grid">
          <thead>
            <tr>
              <th scope="col">${on_device ? "Kernel" : "Operator"}</th>
              <th scope="col">Seconds</th>
              <th scope="col">Calls</th>
            </tr>
          </thead>
          <tbody>
            ${costs.map(
              ({ name, seconds, calls }) => html`
                <tr key=${name}>
                  <th scope="row"><code>${name}</code></th>
                  <td>${seconds.toFixed(4)}</td>
                  <td>${calls}</td>
                </tr>
              `,
            )}
          </tbody>
        </table>
        <p class="row">
          ${files.map(
            (name) => html`
              <a key=${name} href=${jobPath(job.id, "profiles", name)} download>${name}</a>
            `,
          )}
        </p>
      </details>
    `,
  );
}
