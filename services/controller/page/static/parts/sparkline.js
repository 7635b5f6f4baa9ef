// A small line without axes; the words beside it carry the figures.

import { html } from "../lib/html.js";

const WIDTH = 120;
const HEIGHT = 28;

/** `values` with null for gaps; values on both sides of one of the places `breaks` are not comparable. */
export function Sparkline({ values, label, breaks = [] }) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2)
    return html`
      <span class="spark none" aria-hidden="true"></span>
    `;
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const x = (index) => 2 + ((WIDTH - 4) * index) / Math.max(1, values.length - 1);
  const y = (value) => HEIGHT - 3 - ((HEIGHT - 6) * (value - low)) / span;
  const points = values.flatMap((value, index) => (value === null ? [] : [[x(index), y(value)]]));
  const marks = breaks.map((place) => x(place - 0.5));
  const isApart = (index) => !index || marks.some((mark) => points[index - 1][0] < mark && mark < points[index][0]);
  const path = points.map(([a, b], index) => `${isApart(index) ? "M" : "L"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
  const [lastX, lastY] = points.at(-1);
  return html`
    <svg class="spark" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${label}>
      <path d=${path} />
      ${marks.map(
        (mark) => html`
          <line x1=${mark} x2=${mark} y1="0" y2=${HEIGHT} />
        `,
      )}
      <circle cx=${lastX} cy=${lastY} r="2" />
    </svg>
  `;
}
