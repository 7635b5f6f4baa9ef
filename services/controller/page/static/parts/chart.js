// One panel of curves. The pointer or the arrow keys choose a step in all panels at once; a click, or Enter, opens the
// samples behind it. A table of the same figures is for screen readers and for copying.

import { html, useEffect, useMemo, useRef, useState } from "../lib/html.js";
import { number } from "../lib/format.js";
import { aligned } from "../lib/series.js";
import uPlot from "../vendor/uplot.js";

const HEIGHT = 150;
const DASHES = { solid: [], dashed: [6, 4], dotted: [2, 3], points: [], hollow: [] };
const dark = matchMedia("(prefers-color-scheme: dark)");
const together = uPlot.sync("steps");

/** `open(line, step)` shows samples. `steps` is the shared range of steps, so that panels line up. The values before and after
 * one of the steps `breaks` cannot be compared. */
export function Chart({ title, note, lines, range, open, breaks = [] }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [at, setAt] = useState(null);
  const data = useMemo(() => aligned(lines), [lines]);
  const shape = lines.map((line) => `${line.job}${line.metric}${line.color}`).join("|");
  const newest = useRef({});
  newest.current = { lines, data, open, range, breaks };
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(place.current, newest, setAt), newest.current.data, place.current);
    };
    draw();
    const box = place.current;
    const sized = new ResizeObserver(() => plot.current?.setSize({ width: box.clientWidth, height: HEIGHT }));
    sized.observe(box);
    dark.addEventListener("change", draw);
    return () => {
      sized.disconnect();
      dark.removeEventListener("change", draw);
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => plot.current?.setData(data), [data, range[0], range[1], breaks.join()]);
  const index = at ?? data[0].length - 1;
  const step = data[0][index];
  return html`
    <figure class="chart">
      <figcaption>
        <h2>${title}</h2>
        ${
          note &&
          html`
            <span class="soft">${note}</span>
          `
        }
        ${
          breaks.length > 0 &&
          html`
            <span class="soft">rewards changed at step ${breaks.join(", ")}</span>
          `
        }
        <span class="soft end">step ${step ?? "–"}</span>
      </figcaption>
      <ul class="legend">
        ${kindsOf(lines).map(
          (kind) => html`
            <${Kind} ...${kind} value=${(which) => valueAt(data, which, index, at === null)} />
          `,
        )}
      </ul>
      <div
        ref=${place}
        class="plot"
        tabindex="0"
        role="application"
        aria-roledescription="chart"
        aria-label=${`${title}: arrow keys choose a step, Enter shows its samples`}
        onKeyDown=${(event) => steer(event, plot.current, newest.current)}
      ></div>
      <details class="figures">
        <summary>Figures</summary>
        <div class="scroll" tabindex="0" role="region" aria-label=${`Figures of ${title}`}>
          <${Figures} ...${{ lines, data, open }} />
        </div>
      </details>
    </figure>
  `;
}

/** Lines of several jobs that show the same metric share a place in the legend: { label, style, shown }. */
function kindsOf(lines) {
  const kinds = new Map();
  lines.forEach((line, which) => {
    const kind = kinds.get(line.metric) ?? { label: line.label, style: line.style, shown: [] };
    kind.shown.push({ which, color: line.color % 8, name: line.name });
    kinds.set(line.metric, kind);
  });
  return [...kinds.values()];
}

function Kind({ label, style, shown, value }) {
  const isShared = new Set(shown.map(({ color }) => color)).size > 1;
  return html`
    <li>
      <i class=${`swatch ${isShared ? "" : `c${shown[0].color}`} ${style}`} aria-hidden="true"></i>
      ${label}
      ${shown.map(
        ({ which, color, name }) => html`
          ${" "}
          <b class=${isShared ? `c${color}` : ""} title=${name}>${number(value(which))}</b>
        `,
      )}
    </li>
  `;
}

/** The value there; of a line with gaps, while nothing is chosen, its last one. */
function valueAt(data, which, index, isLast) {
  const values = data[which + 1];
  return isLast ? values.findLast((value) => value !== null) : values[index];
}

function Figures({ lines, data, open }) {
  const [shown, setShown] = useState(false);
  const isOne = new Set(lines.map(({ job }) => job)).size === 1;
  const rows = data[0].slice(-500);
  const from = data[0].length - rows.length;
  const see = (element) =>
    element && !shown && element.closest("details").addEventListener("toggle", () => setShown(true), { once: true });
  if (!shown)
    return html`
      <span ref=${see}></span>
    `;
  return html`
    <table>
      <thead>
        <tr>
          <th scope="col">Step</th>
          ${lines.map(
            (line) => html`
              <th scope="col">${isOne ? line.label : `${line.name}, ${line.label}`}</th>
            `,
          )}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (step, row) => html`
            <tr key=${step}>
              <th scope="row">${step}</th>
              ${lines.map((line, which) => {
                const value = data[which + 1][from + row];
                return html`
                  <td>
                    ${
                      value === null
                        ? ""
                        : html`
                            <button type="button" class="link" onClick=${() => open(line, step)}>
                              ${number(value)}
                            </button>
                          `
                    }
                  </td>
                `;
              })}
            </tr>
          `,
        )}
      </tbody>
    </table>
  `;
}

/** The line that has a value at or next to a step and lies nearest to the pointer. */
function nearest({ lines, data }, index, y, plot) {
  const near = lines.map((line, which) => {
    const value = data[which + 1][index];
    return { line, gap: value === null || value === undefined ? Infinity : Math.abs(plot.valToPos(value, "y") - y) };
  });
  return near.reduce((best, one) => (one.gap < best.gap ? one : best));
}

function choose(plot, now, y) {
  const index = plot.cursor.idx;
  if (index === null || index === undefined) return;
  const { line, gap } = nearest(now, index, y, plot);
  if (gap < Infinity) now.open(line, now.data[0][index]);
}

function steer(event, plot, now) {
  const steps = now.data[0];
  const at = plot.cursor.idx ?? steps.length - 1;
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
  if (to !== undefined) {
    event.preventDefault();
    const index = Math.max(0, Math.min(steps.length - 1, to));
    plot.setCursor({ left: plot.valToPos(steps[index], "x"), top: 10 });
  } else if (event.key === "Enter") {
    event.preventDefault();
    choose(plot, now, plot.cursor.top ?? 0);
  }
}

function options(place, newest, setAt) {
  const style = getComputedStyle(place);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = {
    stroke: color("--soft"),
    grid: { stroke: color("--line"), width: 1 },
    ticks: { show: false },
    font: `11px ${style.fontFamily}`,
  };
  return {
    width: place.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    padding: [6, 10, 0, 0],
    cursor: {
      sync: { key: together.key, setSeries: false },
      drag: { x: false, y: false },
      points: { size: 7 },
      y: false,
    },
    scales: {
      x: { time: false, range: () => newest.current.range },
      y: { range: (plot, low, high) => room(low, high) },
    },
    axes: [
      {
        ...axis,
        size: 24,
        space: 60,
        incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000],
      },
      { ...axis, size: 52, space: 28, values: (plot, ticks) => ticks.map(number) },
    ],
    series: [{}, ...newest.current.lines.map((line) => drawn(line, color))],
    hooks: {
      ready: [(plot) => plot.over.addEventListener("click", () => choose(plot, newest.current, plot.cursor.top))],
      draw: [(plot) => newest.current.breaks.forEach((step) => broken(plot, step, color("--ink")))],
      setCursor: [(plot) => setAt(plot.cursor.idx ?? null)],
    },
  };
}

/** A dashed vertical line at a step. */
function broken({ ctx, bbox, valToPos }, step, stroke) {
  const x = valToPos(step, "x", true);
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  ctx.save();
  ctx.strokeStyle = stroke;
  ctx.setLineDash([4, 3]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

function drawn(line, color) {
  const stroke = color(`--c${line.color % 8}`);
  const isPoints = line.style === "points" || line.style === "hollow";
  const fill = line.style === "points" ? stroke : color("--card");
  return {
    stroke,
    width: 1.5,
    dash: DASHES[line.style],
    spanGaps: true,
    points: { show: isPoints || line.points.size < 2, size: 6, fill, stroke },
  };
}

/** Some air above and below; a flat line gets a range of its own. */
function room(low, high) {
  if (low === null || low === undefined) return [0, 1];
  const air = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.1;
  return [low - air, high + air];
}
