// All that is known of one sample, from its prompt to the checkpoint that has learned from it.

import { jobPath, withQuery } from "../../lib/api.js";
import { useFetched } from "../../lib/data.js";
import { moment, number } from "../../lib/format.js";
import { html, useEffect } from "../../lib/html.js";
import { go, link } from "../../lib/router.js";
import { Media } from "../../parts/media.js";
import { Name } from "../../parts/name.js";
import { Await } from "../../parts/states.js";
import { spansOf } from "./timeline.js";
import { tracePlace } from "./samples.js";

export function Trace({ job, place, query }) {
  const purpose = query.purpose ?? "train";
  const loaded = useFetched(withQuery(jobPath(job.id, "samples", ...place), { purpose }));
  return html`
    <${Await} of=${loaded} what="the sample">${(trace) => html`<${Loaded} job=${job} ...${trace} />`}<//>
  `;
}

function Loaded({ job, sample: recorded, group: siblings, ...credit }) {
  const sample = { ...recorded, ...credit };
  const at = siblings.findIndex(({ index }) => index === sample.index);
  const to = (offset) =>
    siblings[at + offset] && go(tracePlace(job, { ...sample, index: siblings[at + offset].index }), true);
  useEffect(() => {
    const keys = (event) => {
      const offset = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!offset || event.target.closest("input, select, textarea, dialog, [role=grid], [role=application]")) return;
      to(offset);
    };
    addEventListener("keydown", keys);
    return () => removeEventListener("keydown", keys);
  });
  const isTrain = sample.purpose === "train";
  return html`
    <article class="trace">
      <div class="picture"><${Media} sample=${sample} controls=${true} /></div>
      <div>
        <h2>${sample.prompt}</h2>
        <p class="row">
          ${
            sample.drop_reason
              ? html`
                  <span class="badge bad">not trained on: ${sample.drop_reason} ${sample.drop_cause}</span>
                `
              : sample.trained_as !== null &&
                html`
                  <span class="badge good">trained on</span>
                `
          }
          ${
            sample.gated_by &&
            html`
              <span class="badge warn">gated by ${sample.gated_by}</span>
            `
          }
          <a href=${link(["jobs", job.id, "samples"], { purpose: sample.purpose, step: sample.step, each: "all" })}>
            All samples of ${isTrain ? "step" : "version"} ${sample.step}
          </a>
        </p>
        <${Scores} sample=${sample} />
        <dl class="facts wide">
          ${facts(sample, isTrain)
            .filter(([, value]) => value !== null && value !== undefined)
            .map(
              ([name, value]) => html`
                <div>
                  <dt>${name}</dt>
                  <dd>${value}</dd>
                </div>
              `,
            )}
        </dl>
        ${
          job.trace_url &&
          html`
            <p><a href=${spansOf(job, sample.step)} target="_blank" rel="noopener">Calls of its step</a></p>
          `
        }
      </div>
    </article>
    ${
      siblings.length > 1 &&
      html`
        <section>
          <h2>Its group</h2>
          <ul class="cards small">
            ${siblings.map(
              (one) => html`
                <li key=${one.index} class="sample">
                  <a
                    href=${tracePlace(job, { ...sample, index: one.index })}
                    aria-current=${one.index === sample.index ? "true" : undefined}
                  >
                    <${Media} sample=${{ ...sample, media: one.media, media_type: one.media_type }} alt=${`sample ${one.index}`} />
                    <span class="scores">
                      <b>${number(one.reward)}</b>
                      ${
                        one.advantage !== null && one.advantage !== undefined
                          ? html`
                              <span>advantage ${number(one.advantage)}</span>
                            `
                          : ""
                      }
                    </span>
                    ${
                      one.drop_reason &&
                      html`
                        <span class="badge warn">${one.drop_reason}</span>
                      `
                    }
                  </a>
                </li>
              `,
            )}
          </ul>
        </section>
      `
    }
  `;
}

function facts(sample, isTrain) {
  return [
    [isTrain ? "Step" : "Version", String(sample.step)],
    ["Group", String(sample.group)],
    ["Index", String(sample.index)],
    [
      "Seed",
      html`
        <code>${String(sample.seed)}</code>
      `,
    ],
    ["Source", sample.source || null],
    ["Policy version", String(sample.policy_version)],
    ["Replica", sample.replica || null],
    ["Advantage", isTrain ? number(sample.advantage) : null],
    ["Ratio at the update", isTrain ? number(sample.ratio) : null],
    ["First version that has it", sample.trained_as ?? null],
    [
      "Checkpoint that has it",
      sample.checkpoint
        ? html`
            step ${sample.checkpoint.step}, ${moment(sample.checkpoint.created_at)}${" "}
            <code>${sample.checkpoint.path}</code>
          `
        : isTrain
          ? "none yet"
          : null,
    ],
  ];
}

function Scores({ sample }) {
  const rows = Object.entries(sample.scores).map(([name, value]) => ({
    name,
    value,
    version: sample.versions?.[name],
    isShadow: false,
  }));
  const shadows = Object.entries(sample.shadow ?? {}).map(([name, value]) => ({
    name,
    value,
    version: "",
    isShadow: true,
  }));
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Scores">
      <table class="grid">
        <thead>
          <tr>
            <th scope="col">Reward</th>
            <th scope="col" class="num">Score</th>
            <th scope="col">Scorer</th>
          </tr>
        </thead>
        <tbody>
          <tr>
            <th scope="row">total</th>
            <td class="num"><b>${number(sample.reward)}</b></td>
            <td></td>
          </tr>
          ${[...rows, ...shadows].map(
            ({ name, value, version, isShadow }) => html`
              <tr key=${name} class=${name.includes(".") ? "part" : ""}>
                <th scope="row">
                  <${Name} of=${name} />${
                    isShadow
                      ? html`
                          <span class="badge soft">shadow</span>
                        `
                      : ""
                  }
                </th>
                <td class="num">${number(value)}</td>
                <td><${Name} of=${version ?? ""} /></td>
              </tr>
            `,
          )}
        </tbody>
      </table>
    </div>
  `;
}
