// Says in words what an action did: on the page for a while, and to screen readers.

import { html, useEffect, useState } from "../lib/html.js";

const SHOWN_MS = 8000;
let tell = () => {};

/** `tone` is "good" or "bad". */
export const announce = (text, tone = "good") => tell({ text, tone });

export function Announcer() {
  const [said, setSaid] = useState(null);
  useEffect(() => {
    let timer;
    tell = (now) => {
      setSaid(now);
      clearTimeout(timer);
      timer = setTimeout(() => setSaid(null), SHOWN_MS);
    };
    return () => clearTimeout(timer);
  }, []);
  return html`
    <div class="announcer" role="status">
      ${
        said &&
        html`
          <p class=${said.tone}>${said.text}</p>
        `
      }
    </div>
  `;
}
