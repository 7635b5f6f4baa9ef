// Pairs to vote on: fetched ahead, votes sent in the background.

import { get, jobPath, post, Refusal, withQuery } from "../../lib/api.js";
import { useCallback, useEffect, useRef, useState } from "../../lib/html.js";

const AHEAD = 6;
const AGAIN_MS = 3000;
const samples = ({ step, group, left, right }) => [step, group, ...[left.index, right.index].sort()].join("/");

/** `{ pairs, waiting, given, error, vote }`: the first pair is the one to show. `vote(choice)` answers it and goes on;
 * `failed(error)` hears of votes that did not arrive. */
export function useQueue(job, voter, failed) {
  const [state, setState] = useState({ pairs: null, waiting: 0, given: 0, error: null });
  const sent = useRef(new Set());
  const newest = useRef(state);
  newest.current = state;

  const refill = useCallback(
    async (signal) => {
      await Promise.allSettled(sent.current);
      try {
        const path = withQuery(jobPath(job, "votes", "next"), { voter, count: AHEAD });
        const found = await get(path, signal);
        setState((before) => {
          const known = before.pairs ?? [];
          const fresh = found.pairs.filter((pair) => !known.some((one) => samples(one) === samples(pair)));
          return { ...before, pairs: [...known, ...fresh], waiting: found.waiting, error: null };
        });
      } catch (error) {
        if (error.name !== "AbortError") setState((before) => ({ ...before, error }));
      }
    },
    [job, voter],
  );

  const isShort = (state.pairs?.length ?? 0) < 2;
  useEffect(() => {
    if (!isShort) return undefined;
    const abort = new AbortController();
    refill(abort.signal);
    const timer = setInterval(() => refill(abort.signal), AGAIN_MS);
    return () => {
      clearInterval(timer);
      abort.abort();
    };
  }, [isShort, refill]);

  const vote = (choice) => {
    const [pair, ...rest] = newest.current.pairs ?? [];
    if (!pair) return;
    const body = { step: pair.step, group: pair.group, left: pair.left.index, right: pair.right.index, choice, voter };
    const call = post(jobPath(job, "votes"), { ...body, id: crypto.getRandomValues(new Uint32Array(3)).join("-") })
      .catch((error) => {
        // a group that others completed meanwhile takes no more votes
        if (!(error instanceof Refusal) || error.status !== 409) failed(error);
      })
      .finally(() => sent.current.delete(call));
    sent.current.add(call);
    newest.current = { ...newest.current, pairs: rest };
    setState((before) => ({ ...before, pairs: rest, given: before.given + 1, waiting: Math.max(0, before.waiting - 1) }));
  };
  return { ...state, vote };
}
