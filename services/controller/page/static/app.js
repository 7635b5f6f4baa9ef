// Starts the page: login if the controller has keys, then the view that the address names.

import { get, onLoggedOut, post, remove } from "./lib/api.js";
import { html, render, useEffect, useState } from "./lib/html.js";
import { useRoute } from "./lib/router.js";
import { Session, takeKey } from "./lib/session.js";
import * as stream from "./lib/stream.js";
import { Shell } from "./parts/shell.js";
import { Login } from "./views/login.js";
import { viewOf } from "./views/index.js";

const key = takeKey();

function App() {
  const [session, setSession] = useState(null);
  const [failure, setFailure] = useState(null);
  const route = useRoute();
  const ask = () => get("/v1/session").then(setSession, setFailure);
  useEffect(() => {
    if (key) post("/v1/session", { key }).then(setSession, ask);
    else ask();
    const look = () => get("/v1/session").then(setSession, () => {});
    const stops = [
      onLoggedOut(ask),
      stream.subscribe("end", ({ reason }) => reason === "session" && ask()),
      stream.subscribe("refused", look),
    ];
    return () => stops.forEach((stop) => stop());
  }, []);
  const isIn = Boolean(session?.may);
  useEffect(() => {
    if (!isIn) return undefined;
    stream.open();
    return stream.close;
  }, [isIn]);
  if (failure)
    return html`
      <main class="center">
        <h1>Flowfleet</h1>
        <p role="alert">${failure.message}</p>
      </main>
    `;
  if (!session)
    return html`
      <main class="center" aria-busy="true"><h1 class="soft">Flowfleet</h1></main>
    `;
  if (!isIn)
    return html`
      <${Login} entered=${setSession} />
    `;
  const logOut = () => remove("/v1/session").finally(ask);
  const { View, section } = viewOf(route);
  return html`
    <${Session.Provider} value=${session}>
      <${Shell} section=${section} session=${session} logOut=${logOut}>
        <${View} key=${section} parts=${route.parts} query=${route.query} />
      <//>
    <//>
  `;
}

render(
  html`
    <${App} />
  `,
  document.getElementById("app"),
);
