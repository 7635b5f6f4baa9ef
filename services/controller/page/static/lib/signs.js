// Signs that a policy hacks its reward: what it is paid for rises while something that only watches falls. Pure.
//
// A measure counts as fallen when its late values lie below its early ones by more than three times its noise and a
// tenth of its size. The noise is the median jump from one value to the next. A sign is a question to the eye, not a
// verdict: it leads to the samples. The verdicts are `val/disagreement` and `val/reward_drop` (validation_limits.py):
// numbers of each validation, of rewards without weight and of the total, that a job may pause for.

const NOISE = 3;
const SHARE = 0.1;
const FEWEST = 4;

const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};

/** { from, to, change, isClear, since } of [[step, value], …]; null where there are too few values. */
export function drift(points) {
  if (points.length < FEWEST) return null;
  const values = points.map(([, value]) => value);
  const few = Math.max(1, Math.min(8, Math.floor(values.length / 4)));
  const [from, to] = [median(values.slice(0, few)), median(values.slice(-few))];
  const noise = median(values.slice(1).map((value, index) => Math.abs(value - values[index])));
  const change = to - from;
  const isClear =
    Math.abs(change) > NOISE * noise * Math.sqrt(1 / few) &&
    Math.abs(change) > SHARE * Math.max(Math.abs(from), Math.abs(to));
  return { from, to, change, isClear, since: turn(points, from, change) };
}

/** First step from which a seventh of the change stays. */
function turn(points, from, change) {
  const passed = ([, value]) => (value - from) / change >= 1 / 7;
  const last = points.findLastIndex((point) => !passed(point));
  return points[Math.min(last + 1, points.length - 1)][0];
}

function pointsOf(rows, metric) {
  return rows.flatMap(({ step, values }) => {
    const value = values[metric];
    return value === null || value === undefined ? [] : [[step, value]];
  });
}

/** What only watches: rewards without weight, and what image statistics say. */
function watched(rewards) {
  const silent = Object.entries(rewards)
    .filter(([, part]) => !part.weight)
    .map(([name]) => name);
  return [
    ...silent.flatMap((name) => [
      { name, by: name, purpose: "train", metric: `critic/rewards/${name}/mean` },
      { name: `${name}, held out`, by: name, purpose: "validate", metric: `val-core/rewards/${name}/mean` },
    ]),
    { name: "edge density, held out", purpose: "validate", metric: "val/edge_density" },
    { name: "color entropy, held out", purpose: "validate", metric: "val/colour_entropy" },
  ];
}

/** Metrics that `signs` reads for these rewards. */
export const signMetrics = (rewards) => [
  "critic/rewards/mean",
  "val/reward",
  ...watched(rewards).map(({ metric }) => metric),
];

/** [{ name, from, to, since, purpose, by }], the steepest fall first; empty where the reward does not rise. */
export function signs(rows, rewards) {
  const gain = drift(pointsOf(rows, "critic/rewards/mean"));
  if (!gain?.isClear || gain.change <= 0) return [];
  const held = { name: "held-out reward", purpose: "validate", metric: "val/reward" };
  const found = [held, ...watched(rewards)].flatMap((measure) => {
    const moved = drift(pointsOf(rows, measure.metric));
    return moved?.isClear && moved.change < 0 ? [{ ...measure, ...moved }] : [];
  });
  return found.sort((a, b) => a.change / Math.abs(a.from) - b.change / Math.abs(b.from));
}
