// Where two rewards judge the samples of the newest step most differently: the samples to look at first.

import { all, get, jobPath } from "../../lib/api.js";
import { useEvent, useLoaded, useThrottled } from "../../lib/data.js";
import { number } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { disagreements, scoreOf } from "../../lib/ranks.js";
import { Media } from "../../parts/media.js";
import { Score, tracePlace } from "../job/samples.js";

async function newest(id, signal) {
  const [last] = (await get(jobPath(id, "samples?order=newest&limit=1"), signal)).items;
  return last ? all(jobPath(id, "samples"), { step: last.step, order: "oldest" }, signal, 1000) : [];
}

export function Disagreement({ job }) {
  const loaded = useLoaded((signal) => newest(job.id, signal), [job.id]);
  const soon = useThrottled(loaded.reload, 3000);
  useEvent("event", ({ type }) => type === "trained" && soon());
  const samples = loaded.data ?? loaded.stale ?? [];
  const pairs = disagreements(samples);
  if (!pairs.length) return null;
  return html`
    <section class="card">
      <h2>Disagreement in step ${samples[0].step}</h2>
      ${pairs.map(
        ({ a, b, correlation, samples: shown }) => html`
          <div class="pair" key=${`${a}/${b}`}>
            <h3>${a} and ${b}: ${words(correlation)}</h3>
            <ul class="cards small">
              ${shown.map(
                ({ sample }) => html`
                  <li class="sample">
                    <a href=${tracePlace(job, sample)}>
                      <${Media} sample=${sample} />
                      <span class="scores">
                        <${Score} name=${a} value=${scoreOf(sample, a)} />
                        <${Score} name=${b} value=${scoreOf(sample, b)} />
                      </span>
                    </a>
                  </li>
                `,
              )}
            </ul>
          </div>
        `,
      )}
    </section>
  `;
}

function words(correlation) {
  if (correlation === null) return "one of them gives all samples the same score";
  const how = correlation > 0.5 ? "mostly the same order" : correlation < -0.2 ? "opposite orders" : "different orders";
  return `${how}, rank correlation ${number(correlation)}`;
}
