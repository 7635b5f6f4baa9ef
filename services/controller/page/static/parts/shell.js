// What every view has around it: navigation, the state of the connection, the log-out, and a voice for screen readers.

import { html, useEffect, useRef, useState } from "../lib/html.js";
import { link, useRoute } from "../lib/router.js";
import { onState } from "../lib/stream.js";
import { VIEWS } from "../views/index.js";
import { Announcer } from "./announce.js";

const STATES = { open: "Live", waiting: "Reconnecting", closed: "Not connected" };

export function Shell({ section, session, logOut, children }) {
  const main = useRef(null);
  const { parts } = useRoute();
  const place = parts.slice(0, 3).join("/");
  const isFirst = useRef(true);
  useEffect(() => {
    if (!isFirst.current) main.current.focus({ preventScroll: true });
    isFirst.current = false;
  }, [place]);
  return html`
    <button type="button" class="skip" onClick=${() => main.current.focus()}>Skip to the content</button>
    <header class="top">
      <a class="brand" href=${link([])}>
        <img src=${new URL("../icon.svg", import.meta.url).pathname} alt="" width="20" height="20" />
        Flowfleet
      </a>
      <nav aria-label="Views">
        ${VIEWS.filter(({ title }) => title).map(
          (view) => html`
            <a href=${link([view.section])} aria-current=${view.section === section ? "page" : undefined}>
              ${view.title}
            </a>
          `,
        )}
      </nav>
      <div class="top-end">
        <${Connection} />
        ${
          session.login &&
          html`
            <span class="who" title="Key that is logged in">${session.name}</span>
            <button type="button" class="quiet" onClick=${logOut}>Log out</button>
          `
        }
      </div>
    </header>
    <main ref=${main} tabindex="-1">${children}</main>
    <${Announcer} />
  `;
}

function Connection() {
  const [state, setState] = useState("closed");
  useEffect(() => onState(setState), []);
  return html`
    <span class="live" data-state=${state} role="status">
      <i aria-hidden="true"></i>
      ${STATES[state]}
    </span>
  `;
}
