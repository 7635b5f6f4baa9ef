// A button that asks once, says what follows, and then acts. Where the key may not steer, there is none.

import { Refusal } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { useMaySteer } from "../lib/session.js";
import { announce } from "./announce.js";

/**
 * `title` and `follows` are the question and what follows; `act(values)` does it and resolves to what to say.
 * `fields` are inputs: [{ name, label, type, value, min }].
 */
export function Act({ label, title, follows, act, fields = [], tone = "", done = () => {} }) {
  const [open, setOpen] = useState(false);
  if (!useMaySteer()) return null;
  return html`
    <button type="button" class=${tone} onClick=${() => setOpen(true)}>${label}</button>
    ${
      open &&
      html`
        <${Question} ...${{ label, title, follows, act, fields, tone, done, close: () => setOpen(false) }} />
      `
    }
  `;
}

function Question({ label, title, follows, act, fields, tone, done, close }) {
  const dialog = useRef(null);
  const [refused, setRefused] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    const opener = document.activeElement;
    dialog.current.showModal();
    return () => opener?.focus?.();
  }, []);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setRefused("");
    try {
      announce(await act(Object.fromEntries(new FormData(event.target))));
      done();
      close();
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      setRefused(error.message);
      setBusy(false);
    }
  };
  return html`
    <dialog ref=${dialog} aria-labelledby="question" onClose=${close} class="question">
      <form onSubmit=${submit}>
        <h2 id="question">${title}</h2>
        <p>${follows}</p>
        ${fields.map(
          ({ name, label: text, options, ...rest }) => html`
            <label class="field">
              <span>${text}</span>
              ${
                options
                  ? html`
                      <select name=${name}>
                        ${options.map(
                          (option) => html`
                            <option>${option}</option>
                          `,
                        )}
                      </select>
                    `
                  : html`
                      <input name=${name} required ...${rest} />
                    `
              }
            </label>
          `,
        )}
        ${
          refused &&
          html`
            <p class="bad" role="alert">${refused}</p>
          `
        }
        <div class="row end">
          <button type="button" onClick=${() => dialog.current.close()}>Keep as it is</button>
          <button type="submit" class=${`primary ${tone}`} disabled=${busy}>${label}</button>
        </div>
      </form>
    </dialog>
  `;
}
