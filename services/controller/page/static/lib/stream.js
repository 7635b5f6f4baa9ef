// The page's one event stream. Views subscribe by event type; a view of a job also asks for that job's events.

const EVENTS = ["hello", "jobs", "event", "fleet", "reset", "end"];
const listeners = new Map(EVENTS.map((type) => [type, new Set()]));
const states = new Set();
const wanted = [];

let source = null;
let current = null;
let state = "closed";

/** Calls back with the event's data; returns what ends it. */
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
  if (source) return;
  current = wanted.at(-1)?.job ?? null;
  source = new EventSource(current ? `/v1/stream?job=${encodeURIComponent(current)}` : "/v1/stream");
  source.onopen = () => tell("open");
  source.onerror = () => {
    tell("waiting");
    if (source?.readyState === EventSource.CLOSED) setTimeout(reopen, 3000);
  };
  for (const type of EVENTS) source.addEventListener(type, (event) => hear(type, JSON.parse(event.data || "{}")));
}

export function close() {
  source?.close();
  source = null;
  tell("closed");
}

function hear(type, data) {
  if (type === "end" && data.reason === "session") close();
  listeners.get(type).forEach((listener) => listener(data));
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
  open();
}

function tell(now) {
  state = now;
  states.forEach((listener) => listener(now));
}
