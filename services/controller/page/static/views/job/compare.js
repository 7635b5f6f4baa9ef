// Two versions of one prompt over each other, with a slider between them.

import { number } from "../../lib/format.js";
import { HeldOut, mediaPath } from "../../lib/held_out.js";
import { html, useEffect, useMemo, useRef, useState } from "../../lib/html.js";
import { Media } from "../../parts/media.js";

/** Opens with the chosen version as "after" and the oldest one, or the next older, as "before". */
export function Compare({ job, versions, prompts, first, group: start, version, close }) {
  const dialog = useRef(null);
  const [group, setGroup] = useState(start);
  const oldest = versions.at(-1);
  const [after, setAfter] = useState(version === oldest ? versions[0] : version);
  const [before, setBefore] = useState(oldest);
  const [share, setShare] = useState(50);
  const [, setTurn] = useState(0);
  const samples = useMemo(() => new HeldOut(job.id, () => setTurn((turn) => turn + 1)), [job.id]);
  useEffect(() => dialog.current.showModal(), []);
  useEffect(() => samples.want([before, after], group, group + 1), [before, after, group]);
  const at = (which) =>
    samples.at(which, group) ?? { ...first, media: mediaPath(job.id, which, group), prompt: "", reward: undefined };
  const step = (by) => setGroup(Math.max(0, Math.min(prompts - 1, group + by)));
  const keys = (event) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!by || event.target.tagName === "SELECT") return;
    event.preventDefault();
    step(by);
  };
  const [left, right] = [at(before), at(after)];
  return html`
    <dialog ref=${dialog} class="compare" aria-labelledby="compared" onClose=${close} onKeyDown=${keys}>
      <div class="row">
        <h2 id="compared">Before and after</h2>
        <div class="row end">
          <button type="button" onClick=${() => step(-1)} disabled=${group === 0}>Prompt before</button>
          <button type="button" onClick=${() => step(1)} disabled=${group === prompts - 1}>Next prompt</button>
          <button type="button" onClick=${() => dialog.current.close()}>Close</button>
        </div>
      </div>
      <p class="prompt">${right.prompt || left.prompt || "…"}</p>
      <div class="over" style=${{ "--share": `${share}%` }}>
        <${Media} sample=${right} alt=${`version ${after}`} />
        <div class="before"><${Media} sample=${left} alt=${`version ${before}`} /></div>
        <span class="edge" aria-hidden="true"></span>
      </div>
      <input
        type="range"
        min="0"
        max="100"
        value=${share}
        aria-label="Share of the version before"
        onInput=${(event) => setShare(Number(event.target.value))}
      />
      <div class="row sides">
        <${Side} name="Before" ...${{ versions, value: before, set: setBefore, sample: left }} />
        <${Side} name="After" ...${{ versions, value: after, set: setAfter, sample: right }} />
      </div>
    </dialog>
  `;
}

function Side({ name, versions, value, set, sample }) {
  const scores = Object.entries(sample.scores ?? {}).filter(([score]) => !score.includes("."));
  return html`
    <div>
      <label class="inline">
        ${name}: version
        <select value=${value} onChange=${(event) => set(Number(event.target.value))}>
          ${versions.map(
            (version) => html`
              <option value=${version} selected=${version === value}>${version}</option>
            `,
          )}
        </select>
      </label>
      <span class="scores">
        <b>${number(sample.reward)}</b>
        ${scores.map(
          ([score, figure]) => html`
            <span>${score} ${number(figure)}</span>
          `,
        )}
      </span>
    </div>
  `;
}
