// What a view shows while data come, where they cannot come, and where there are none; and the badge of a status.

import { html } from "../lib/html.js";

/** Shows `children(data)` once there are data; before, a quiet line, and on failure what the controller says. */
export function Await({ of, what, children }) {
  const data = of.data ?? of.stale;
  if (of.error) {
    const again = html`
      <button type="button" onClick=${of.reload}>Try again</button>
    `;
    if (!data)
      return html`
        <div class="notice bad" role="alert">
          <p>${of.error.message}</p>
          ${again}
        </div>
      `;
  }
  if (!data)
    return html`
      <p class="loading" aria-busy="true">Loading ${what} …</p>
    `;
  return children(data);
}

export const Empty = ({ children }) => html`
  <p class="empty">${children}</p>
`;

const ENDED = new Set(["succeeded", "failed", "cancelled"]);
const TONES = {
  running: "good",
  starting: "good",
  queued: "soft",
  paused: "warn",
  quarantined: "bad",
  succeeded: "soft",
  failed: "bad",
  cancelled: "soft",
};

const COMING = { cancelled: "cancelling", paused: "pausing", deleted: "being deleted" };

/** A job's status, and what it was asked to become; of several jobs their number. */
export const Status = ({ of, desired, count = "" }) => html`
  <span class=${`badge ${TONES[of] ?? "soft"}`}>${count} ${of}</span>
  ${
    desired !== of &&
    !ENDED.has(of) &&
    COMING[desired] &&
    html`
      <span class="badge warn">${COMING[desired]}</span>
    `
  }
`;

export function Meter({ value, of, label }) {
  const share = of ? Math.min(1, value / of) : 0;
  return html`
    <span class="meter" role="img" aria-label=${label}><i style=${{ width: `${100 * share}%` }}></i></span>
  `;
}
