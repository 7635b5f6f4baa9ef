// Hooks that fetch and stay fresh.

import { get } from "./api.js";
import { useCallback, useEffect, useRef, useState } from "./html.js";
import { follow, subscribe } from "./stream.js";

/** `{ data, error, reload }` of an asynchronous `load(signal)`, again whenever a dependency changes. Older data stay
 * visible while newer ones come, unless `key` differs. */
export function useLoaded(load, dependencies) {
  const [state, setState] = useState({ data: null, error: null, key: null });
  const [turn, setTurn] = useState(0);
  const key = JSON.stringify(dependencies);
  useEffect(() => {
    const abort = new AbortController();
    load(abort.signal).then(
      (data) => !abort.signal.aborted && setState({ data, error: null, key }),
      (error) => !abort.signal.aborted && setState((before) => ({ ...before, error, key: before.key })),
    );
    return () => abort.abort();
  }, [key, turn]);
  const reload = useCallback(() => setTurn((before) => before + 1), []);
  const isCurrent = state.key === key;
  return { data: isCurrent ? state.data : null, stale: state.data, error: state.error, reload };
}

/** The JSON of a path; null asks nothing. */
export const useFetched = (path) => useLoaded((signal) => (path ? get(path, signal) : Promise.resolve(null)), [path]);

/** Calls back on events of a type, always with the newest callback. */
export function useEvent(type, listener) {
  const newest = useRef(listener);
  newest.current = listener;
  useEffect(() => subscribe(type, (data) => newest.current(data)), [type]);
}

/** The stream carries this job's events while the view lasts. */
export function useFollowed(job) {
  useEffect(() => (job ? follow(job) : undefined), [job]);
}

/** Reloads when the stream says that something was missed. */
export function useResync(reload) {
  const isFirst = useRef(true);
  useEvent("hello", () => {
    if (!isFirst.current) reload();
    isFirst.current = false;
  });
  useEvent("reset", reload);
}

/** At most one call within `ms`; the last one counts. */
export function useThrottled(act, ms) {
  const timer = useRef(null);
  const newest = useRef(act);
  newest.current = act;
  useEffect(() => () => clearTimeout(timer.current), []);
  return useCallback(() => {
    timer.current ??= setTimeout(() => {
      timer.current = null;
      newest.current();
    }, ms);
  }, [ms]);
}
