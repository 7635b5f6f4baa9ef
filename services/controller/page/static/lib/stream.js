// The page's one event stream. Views subscribe by event type; a view of a job also asks for that job's events.
//
// A browser has six connections to a controller, and each open stream keeps one. So a tab that has been hidden for
// HIDDEN_MS closes its stream; once it is seen again it opens one, and views read again what they missed.

const EVENTS = ["hello", "jobs", "event", "fleet", "reset", "end"];
const listeners = new Map([...EVENTS, "refused"].map((type) => [type, new Set()]));
const states = new Set();
const wanted = [];

const HIDDEN_MS = 5000;

let isWanted = false;
let hasMissed = false;
let timer = null;
let source = null;
let current = null;
let state = "closed";

/** Calls back with the event's data; returns what ends it. "refused" is an answer that is not a stream. */
export function subscribe(type, listener) {
  listeners.get(type).add(listener);
  return () => listeners.get(type).delete(listener);
}

/** Calls back with "open", "waiting" or "closed" as the connection changes. */
export function onState(listener) {
  states.add(listener);
  listener(state);
  return () => states.delete(listener);
}

/** Asks for the events of a job too, the newest wish counts; returns what ends it. */
export function follow(job) {
  const wish = { job };
  wanted.push(wish);
  refresh();
  return () => {
    wanted.splice(wanted.indexOf(wish), 1);
    refresh();
  };
}

export function open() {
  isWanted = true;
  if (document.hidden) hasMissed = true;
  else connect();
}

export function close() {
  isWanted = false;
  end();
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (document.hidden)
    timer = setTimeout(() => {
      hasMissed = true;
      end();
    }, HIDDEN_MS);
  else if (isWanted) connect();
});

function connect() {
  if (source) return;
  current = wanted.at(-1)?.job ?? null;
  source = new EventSource(current ? `/v1/stream?job=${encodeURIComponent(current)}` : "/v1/stream");
  source.onopen = () => tell("open");
  source.onerror = () => {
    tell("waiting");
    if (source?.readyState !== EventSource.CLOSED) return;
    listeners.get("refused").forEach((listener) => listener({}));
    setTimeout(reopen, 3000);
  };
  for (const type of EVENTS) source.addEventListener(type, (event) => hear(type, JSON.parse(event.data || "{}")));
}

function end() {
  source?.close();
  source = null;
  tell("closed");
}

function hear(type, data) {
  if (type === "end" && data.reason === "session") close();
  listeners.get(type).forEach((listener) => listener(data));
  if (type === "hello" && hasMissed) {
    hasMissed = false;
    listeners.get("reset").forEach((listener) => listener({}));
  }
}

function refresh() {
  const job = wanted.at(-1)?.job ?? null;
  if (!source || job === current) return;
  queueMicrotask(() => (wanted.at(-1)?.job ?? null) !== current && reopen());
}

function reopen() {
  if (!source) return;
  source.close();
  source = null;
  connect();
}

function tell(now) {
  state = now;
  states.forEach((listener) => listener(now));
}
