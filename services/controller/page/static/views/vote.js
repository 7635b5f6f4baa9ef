// Votes: two samples of one prompt, and keys for the better one. The pair after it loads meanwhile.

import { jobPath } from "../lib/api.js";
import { useFetched } from "../lib/data.js";
import { short } from "../lib/format.js";
import { html, useCallback, useEffect, useState } from "../lib/html.js";
import { link } from "../lib/router.js";
import { useSession } from "../lib/session.js";
import { announce } from "../parts/announce.js";
import { Media } from "../parts/media.js";
import { Await, Empty } from "../parts/states.js";
import { useQueue } from "./vote/queue.js";

const CHOICES = [
  { choice: "left", title: "Left", keys: ["ArrowLeft", "a"], shown: "←" },
  { choice: "tie", title: "Tie", keys: ["ArrowUp", "t"], shown: "↑", note: "Both are equally good" },
  { choice: "neither", title: "Neither", keys: ["ArrowDown", "n"], shown: "↓", note: "Both are bad" },
  { choice: "right", title: "Right", keys: ["ArrowRight", "d"], shown: "→" },
];
const NAME = "flowfleet-voter";
const SHARED = ["", "operator"];

export function Vote({ parts }) {
  const id = parts[1];
  const { name, may } = useSession();
  const job = useFetched(id ? jobPath(id) : null);
  const [given, setGiven] = useState(localStorage.getItem(NAME) ?? "");
  const isShared = SHARED.includes(name ?? "");
  const named = (text) => {
    localStorage.setItem(NAME, text);
    setGiven(text);
  };
  if (!id) return html`<h1>Vote</h1><${Empty}>Open the votes of a job from its page.<//>`;
  if (may === "look") return html`<h1>Vote</h1><p class="notice">Your key may look. Ask the operator for one that may vote.</p>`;
  const voter = isShared ? given : name;
  return html`
    <div class="head job-head">
      <p class="crumbs"><a href=${link(["jobs", id])}>${job.data?.name ?? "Job"}</a> / <code title=${id}>${short(id)}</code></p>
      <h1>Which is better?</h1>
    </div>
    ${voter ? html`<${Pairs} key=${voter} ...${{ id, voter }} />` : html`<${WhoVotes} named=${named} />`}
    ${isShared && voter && html`<p class="soft small vote-who">You vote as ${voter}. <button type="button" class="link" onClick=${() => named("")}>Change the name</button></p>`}
    <${Report} id=${id} />
  `;
}

function WhoVotes({ named }) {
  const submit = (event) => {
    event.preventDefault();
    named(new FormData(event.target).get("voter"));
  };
  return html`<form class="login" onSubmit=${submit}>
    <label class="field"><span>Your name, kept with your votes</span>
      <input name="voter" required pattern="[A-Za-z0-9._@\\-]+" maxlength="64" autocomplete="nickname" title="Letters, digits and . _ @ -" />
    </label>
    <button type="submit" class="primary">Start</button>
  </form>`;
}

function Pairs({ id, voter }) {
  const failed = useCallback((error) => announce(`The vote did not arrive: ${error.message}`, "bad"), []);
  const queue = useQueue(id, voter, failed);
  useEffect(() => {
    const pressed = (event) => {
      if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
      const found = CHOICES.find(({ keys }) => keys.includes(event.key));
      if (!found) return;
      event.preventDefault();
      queue.vote(found.choice);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
  return html`<${Await} of=${{ data: queue.pairs, error: queue.error }} what="pairs">
    ${([pair, next]) => html`
      ${pair
        ? html`<${Pair} ...${{ pair, vote: queue.vote }} />`
        : html`<${Empty}>No pair waits for your vote. The page looks again every few seconds.<//>`}
      <p class="soft small" role="status">${queue.given} votes given, ${queue.waiting} wanted</p>
      ${next && html`<div class="hidden" aria-hidden="true">${[next.left, next.right].map((side) => html`<${Media} key=${side.media} sample=${side} alt="" play=${false} />`)}</div>`}
    `}
  <//>`;
}

function Pair({ pair, vote }) {
  return html`
    <p class="vote-prompt">${pair.prompt}</p>
    <div class="vote-pair">
      ${["left", "right"].map((side) => html`<figure key=${side}>
        <div class="vote-media" onClick=${() => vote(side)}><${Media} key=${pair[side].media} sample=${pair[side]} alt=${side === "left" ? "Left sample" : "Right sample"} /></div>
      </figure>`)}
    </div>
    <div class="vote-keys">
      ${CHOICES.map(({ choice, title, shown, note }) => html`<button type="button" key=${choice} title=${note} onClick=${() => vote(choice)}>
        ${title} <kbd aria-hidden="true">${shown}</kbd>
      </button>`)}
    </div>
  `;
}

/** How voters agree, asked for when it is opened. */
function Report({ id }) {
  const [isOpen, setOpen] = useState(false);
  const report = useFetched(isOpen ? jobPath(id, "votes", "report") : null);
  return html`<details class="vote-report" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Agreement of voters</summary>
    ${isOpen && html`<${Await} of=${report} what="the report">${(found) => html`<${Agreement} found=${found} />`}<//>`}
  </details>`;
}

const share = (value) => (value === null ? "–" : `${Math.round(100 * value)} %`);

function Agreement({ found }) {
  return html`
    ${found.warnings.map((text) => html`<p class="notice" key=${text}>${text}</p>`)}
    <p>${found.votes} votes on ${found.groups} groups. Voters agree on ${share(found.agreement)} of the pairs that several saw.</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Voters"><table class="grid">
      <thead><tr><th scope="col">Voter or reward</th><th scope="col" class="num">Votes</th><th scope="col" class="num">Same choice again</th><th scope="col" class="num">As others</th></tr></thead>
      <tbody>
        ${found.voters.map((one) => html`<tr key=${one.name}><th scope="row">${one.name}</th><td class="num">${one.votes}</td><td class="num">${share(one.consistency)}</td><td class="num">${share(one.agreement)}</td></tr>`)}
        ${Object.entries(found.rewards).map(([name, one]) => html`<tr key=${`reward ${name}`}><th scope="row">${name} (reward)</th><td class="num">${one.pairs}</td><td class="num">–</td><td class="num">${share(one.agreement)}</td></tr>`)}
      </tbody>
    </table></div>
  `;
}
