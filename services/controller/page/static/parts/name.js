// A name that a narrow place breaks after its marks alone, never inside a word.

import { html } from "../lib/html.js";

export const Name = ({ of }) =>
  of.split(/(?<=[._/-])/).map(
    (part, at) => html`
      ${
        at
          ? html`
              <wbr />
            `
          : ""
      }${part}
    `,
  );
