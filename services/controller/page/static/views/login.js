// The login: an API key for a session in a cookie that scripts cannot read.

import { post } from "../lib/api.js";
import { html, useState } from "../lib/html.js";

export function Login({ entered }) {
  const [refused, setRefused] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    const { key } = Object.fromEntries(new FormData(event.target));
    try {
      entered(await post("/v1/session", { key }));
    } catch (error) {
      setRefused(error.message);
    }
  };
  return html`
    <main class="center">
      <form class="login" onSubmit=${submit}>
        <h1>Flowfleet</h1>
        <label class="field">
          <span>API key</span>
          <input
            name="key"
            type="password"
            autocomplete="current-password"
            required
            autofocus
            aria-describedby="login-note"
          />
        </label>
        ${
          refused &&
          html`
            <p class="bad" role="alert">${refused}</p>
          `
        }
        <button type="submit" class="primary">Log in</button>
        <p id="login-note" class="soft small">
          The key becomes a session of this browser. The link that <code>flowfleet up</code> prints logs in by itself.
        </p>
      </form>
    </main>
  `;
}
