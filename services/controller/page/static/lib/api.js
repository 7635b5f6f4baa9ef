// Calls of the REST API. A refusal becomes a Refusal, whose message is what the controller says.

export class Refusal extends Error {
  constructor(status, problem) {
    const lines = (problem.errors ?? []).map((error) => error.detail);
    super([problem.detail || problem.title || `the controller answered ${status}`, ...lines].join("\n"));
    this.status = status;
  }
}

const listeners = new Set();

/** Calls back when an answer says that the session has ended. */
export function onLoggedOut(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** JSON of an answer. Raises Refusal; status 0 where the controller cannot be reached. */
export async function call(method, path, body, signal) {
  const headers = { accept: "application/json" };
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, { detail: "The controller cannot be reached." });
  }
  if (answer.status === 204) return null;
  const content = await answer.text().then(parsed).catch(() => ({}));
  if (answer.ok) return content;
  if (answer.status === 401 && !path.startsWith("/v1/session")) listeners.forEach((listener) => listener());
  throw new Refusal(answer.status, content);
}

/** JSON with seeds as text: most have more digits than a number holds here. */
const parsed = (text) => JSON.parse(text.replaceAll(/"seed":\s*(\d+)/g, '"seed":"$1"'));

export const get = (path, signal) => call("GET", path, undefined, signal);
export const post = (path, body) => call("POST", path, body);
export const patch = (path, body) => call("PATCH", path, body);
export const remove = (path) => call("DELETE", path);

/** A path with those parameters that have a value. */
export function withQuery(path, parameters) {
  const known = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(known).toString();
  return query ? `${path}?${query}` : path;
}

/** All items of a paged list, at most `most`. */
export async function all(path, parameters = {}, signal = undefined, most = 20000) {
  const items = [];
  let cursor = null;
  do {
    const page = await get(withQuery(path, { limit: 500, ...parameters, cursor: cursor ?? parameters.cursor }), signal);
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor && items.length < most);
  return items;
}

/** Path of a job in the API. */
export const jobPath = (id, ...rest) => ["/v1/jobs", id, ...rest].join("/");
