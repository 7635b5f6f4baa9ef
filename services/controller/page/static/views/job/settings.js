// The settings of a job, all of them, or those that differ from another job's.

import { jobPath } from "../../lib/api.js";
import { useFetched } from "../../lib/data.js";
import { html, useState } from "../../lib/html.js";
import { go, link } from "../../lib/router.js";
import { Name } from "../../parts/name.js";
import { Await, Empty } from "../../parts/states.js";

/** [["trainer.optimizer.lr", 0.001], …] */
function flat(value, path = []) {
  const isTable = value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length;
  return isTable
    ? Object.entries(value).flatMap(([key, inner]) => flat(inner, [...path, key]))
    : [[path.join("."), value]];
}

const shown = (value) =>
  value === undefined || value === null ? "not set" : typeof value === "string" ? value : JSON.stringify(value);

export function Settings({ job, query }) {
  const list = useFetched("/v1/overview?limit=200");
  const others = (list.data?.items ?? []).filter(({ id }) => id !== job.id);
  const choose = (event) => go(link(["jobs", job.id, "settings"], { other: event.target.value }));
  return html`
    <div class="row">
      <label class="inline">
        Differences to
        <select value=${query.other ?? ""} onChange=${choose}>
          <option value="">no other job</option>
          ${others.map(
            ({ id, name }) => html`
              <option value=${id} selected=${id === query.other}>${name} · ${id.slice(0, 13)}</option>
            `,
          )}
        </select>
      </label>
    </div>
    ${
      query.other
        ? html`
            <${Differences} ...${{ job, other: query.other }} />
          `
        : html`
            <${Everything} job=${job} />
          `
    }
  `;
}

/** Settings that two jobs do not share. */
function differences(one, other) {
  const [left, right] = [new Map(flat(one)), new Map(flat(other))];
  const names = [...new Set([...left.keys(), ...right.keys()])];
  const isOther = (setting) => shown(left.get(setting)) !== shown(right.get(setting));
  return names.filter(isOther).map((setting) => ({ setting, this: left.get(setting), other: right.get(setting) }));
}

function Differences({ job, other }) {
  const loaded = useFetched(jobPath(other));
  return html`
    <${Await} of=${loaded} what="the differences">
      ${({ spec, name }) => {
        const items = differences(job.spec, spec);
        return items.length
          ? html`
              <table class="grid settings">
                <thead>
                  <tr>
                    <th scope="col">Setting</th>
                    <th scope="col">${job.name}</th>
                    <th scope="col">${name}</th>
                  </tr>
                </thead>
                <tbody>
                  ${items.map(
                    (item) => html`
                      <tr key=${item.setting}>
                        <th scope="row"><${Name} of=${item.setting} /></th>
                        <td><code>${shown(item.this)}</code></td>
                        <td><code>${shown(item.other)}</code></td>
                      </tr>
                    `,
                  )}
                </tbody>
              </table>
            `
          : html`
              <${Empty}>Both jobs have the same settings.<//>
            `;
      }}
    <//>
  `;
}

function Everything({ job }) {
  const [words, setWords] = useState("");
  const found = flat(job.spec).filter(([name, value]) =>
    `${name} ${shown(value)}`.toLowerCase().includes(words.toLowerCase()),
  );
  return html`
    <input
      type="search"
      aria-label="Filter settings"
      placeholder="Filter settings"
      value=${words}
      onInput=${(event) => setWords(event.target.value)}
    />
    <table class="grid settings">
      <thead>
        <tr>
          <th scope="col">Setting</th>
          <th scope="col">Value</th>
        </tr>
      </thead>
      <tbody>
        ${found.map(
          ([name, value]) => html`
            <tr key=${name} class=${value === null ? "soft" : ""}>
              <th scope="row"><${Name} of=${name} /></th>
              <td><code>${shown(value)}</code></td>
            </tr>
          `,
        )}
      </tbody>
    </table>
  `;
}
