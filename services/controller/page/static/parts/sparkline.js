// A small line without axes; the words beside it carry the figures.

import { html } from "../lib/html.js";

const WIDTH = 120;
const HEIGHT = 28;

/** `values` with null for gaps. */
export function Sparkline({ values, label }) {
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
  const path = points.map(([a, b], index) => `${index ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
  const [lastX, lastY] = points.at(-1);
  return html`
    <svg class="spark" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${label}>
      <path d=${path} />
      <circle cx=${lastX} cy=${lastY} r="2" />
    </svg>
  `;
}
