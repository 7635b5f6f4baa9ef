// The scrolled grid of the gallery. While it scrolls, only the pictures in sight and one column of records load, so that
// nothing else takes their connections; the rest follows once it rests and these are there.

import { HeldOut, mediaPath } from "../../lib/held_out.js";
import { number } from "../../lib/format.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../../lib/html.js";
import { go } from "../../lib/router.js";
import { Media } from "../../parts/media.js";
import { inSight, useRested, useScrolled } from "../../parts/virtual.js";
import { tracePlace } from "./samples.js";

const SCORE = 22;
const GAP = 6;
const HEADS = 30;
const PROMPT = matchMedia("(max-width: 640px)").matches ? 104 : 220;

export function Grid({ job, versions, prompts, first, size, compare }) {
  const box = useRef(null);
  const seen = useScrolled(box);
  const [active, setActive] = useState({ row: 0, column: 0 });
  const [, setTurn] = useState(0);
  const samples = useMemo(() => new HeldOut(job.id, () => setTurn((turn) => turn + 1)), [job.id]);
  const [wide, high] = [size + GAP, size + SCORE + GAP];
  const isRested = useRested(`${seen.top} ${seen.left}`, () => isPainted(box.current));
  const [top, bottom] = inSight(seen.top, seen.height - HEADS, high, prompts, isRested ? 2 : 0);
  const [left, right] = inSight(seen.left, seen.width - PROMPT, wide, versions.length, isRested ? 1 : 0);
  useEffect(() => {
    if (seen.height) samples.want(versions.slice(left, isRested ? right : left + 1), top, bottom);
  }, [samples, top, bottom, left, right, versions.length, isRested, Boolean(seen.height)]);

  const moved = useRef(false);
  const move = (to) => {
    moved.current = true;
    setActive({ row: clamp(to.row, prompts), column: clamp(to.column, versions.length) });
  };
  useLayoutEffect(() => {
    if (!moved.current) return;
    reveal(box.current, active, wide, high);
  }, [active]);
  useLayoutEffect(() => {
    const cell = moved.current && box.current.querySelector("[tabindex='0'][role=gridcell]");
    if (!cell) return;
    cell.focus({ preventScroll: true });
    moved.current = false;
  });
  const rows = Array.from({ length: bottom - top }, (_, offset) => top + offset);
  const columns = versions.slice(left, right).map((version, offset) => ({ version, column: left + offset }));
  return html`
    <div
      ref=${box}
      class="gallery"
      role="grid"
      aria-label="Held-out samples: prompts by versions"
      aria-rowcount=${prompts + 1}
      aria-colcount=${versions.length + 1}
      onKeyDown=${(event) => steer(event, active, { move, prompts, versions, high, seen, compare, samples, job })}
    >
      <div
        class="canvas"
        style=${{ width: `${PROMPT + versions.length * wide}px`, height: `${HEADS + prompts * high}px` }}
      >
        <div role="row" class="heads" aria-rowindex="1" style=${{ height: `${HEADS}px` }}>
          <span role="columnheader" class="prompt" aria-colindex="1" style=${{ width: `${PROMPT}px` }}>Prompt</span>
          ${columns.map(
            ({ version, column }) => html`
              <span
                key=${version}
                role="columnheader"
                aria-colindex=${column + 2}
                class="version"
                style=${{ left: `${PROMPT + column * wide}px`, width: `${size}px` }}
              >
                version ${version}
              </span>
            `,
          )}
        </div>
        ${rows.map(
          (row) => html`
            <div
              key=${row}
              role="row"
              class="line"
              aria-rowindex=${row + 2}
              style=${{ top: `${HEADS + row * high}px`, height: `${high}px` }}
            >
              <span
                role="rowheader"
                class="prompt"
                aria-colindex="1"
                style=${{ width: `${PROMPT}px`, height: `${high - GAP}px` }}
              >
                ${promptOf(samples, versions, row, left, right)}
              </span>
              ${columns.map(
                ({ version, column }) => html`
                  <${Cell}
                    key=${version}
                    ...${{ job, version, row, column, first, size }}
                    sample=${samples.at(version, row)}
                    left=${PROMPT + column * wide}
                    isActive=${active.row === row && active.column === column}
                    choose=${() => setActive({ row, column })}
                  />
                `,
              )}
            </div>
          `,
        )}
      </div>
    </div>
  `;
}

/** Also true once the grid is gone: its timer may outlive it. */
const isPainted = (grid) => [...(grid?.querySelectorAll("img") ?? [])].every((picture) => picture.complete);
const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));

function promptOf(samples, versions, row, left, right) {
  for (const version of versions.slice(left, right)) {
    const sample = samples.at(version, row);
    if (sample) return sample.prompt;
  }
  return "…";
}

function Cell({ job, version, row, column, sample, first, size, left, isActive, choose }) {
  const known = sample ?? { ...first, step: version, group: row, index: 0, reward: undefined, prompt: "" };
  const shown = { ...known, media: sample?.media ?? mediaPath(job.id, version, row) };
  const words = `version ${version}, reward ${number(sample?.reward)}`;
  return html`
    <div
      role="gridcell"
      aria-colindex=${column + 2}
      class="cell"
      tabindex=${isActive ? 0 : -1}
      onFocus=${choose}
      aria-label=${words}
      style=${{ left: `${left}px`, width: `${size}px` }}
    >
      <a href=${tracePlace(job, shown)} tabindex="-1" aria-label=${words}>
        <span class="frame" style=${{ height: `${size}px` }}><${Media} sample=${shown} alt="" /></span>
        <span class="score">${sample ? number(sample.reward) : ""}</span>
      </a>
    </div>
  `;
}

/** Scrolls as little as shows the cell. */
function reveal(box, { row, column }, wide, high) {
  const [x, y] = [column * wide, row * high];
  const [width, height] = [box.clientWidth - PROMPT, box.clientHeight - HEADS];
  if (x < box.scrollLeft) box.scrollLeft = x;
  else if (x + wide > box.scrollLeft + width) box.scrollLeft = x + wide - width;
  if (y < box.scrollTop) box.scrollTop = y;
  else if (y + high > box.scrollTop + height) box.scrollTop = y + high - height;
}

function steer(event, { row, column }, { move, prompts, versions, high, seen, compare, samples, job }) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const page = Math.max(1, Math.floor((seen.height - HEADS) / high));
  const places = {
    ArrowLeft: [row, column - 1],
    ArrowRight: [row, column + 1],
    ArrowUp: [row - 1, column],
    ArrowDown: [row + 1, column],
    PageUp: [row - page, column],
    PageDown: [row + page, column],
    Home: [event.shiftKey ? 0 : row, 0],
    End: [event.shiftKey ? prompts - 1 : row, versions.length - 1],
  };
  const place = places[event.key];
  if (place) move({ row: place[0], column: place[1] });
  else if (event.key === "Enter") {
    const sample = samples.at(versions[column], row);
    if (sample) go(tracePlace(job, sample));
  } else if (event.key.toLowerCase() === "c" && versions.length > 1) compare({ group: row, version: versions[column] });
  else return;
  event.preventDefault();
}
