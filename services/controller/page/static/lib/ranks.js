// How differently two rewards judge the same samples. Pure.

/** Ranks from 1, ties share their mean. */
export function ranks(values) {
  const order = values.map((_, index) => index).sort((a, b) => values[a] - values[b]);
  const found = new Array(values.length);
  for (let start = 0; start < order.length;) {
    let end = start;
    while (end + 1 < order.length && values[order[end + 1]] === values[order[start]]) end += 1;
    for (let at = start; at <= end; at += 1) found[order[at]] = (start + end) / 2 + 1;
    start = end + 1;
  }
  return found;
}

/** Spearman's rank correlation; null with fewer than two samples, or where one side is constant. */
export function spearman(a, b) {
  if (a.length < 2) return null;
  const [x, y] = [ranks(a), ranks(b)];
  const mean = (a.length + 1) / 2;
  const sum = (left, right) => left.reduce((total, value, at) => total + (value - mean) * (right[at] - mean), 0);
  const size = Math.sqrt(sum(x, x) * sum(y, y));
  return size ? sum(x, y) / size : null;
}

/** Rewards and shadows of samples, without components. */
export function scorersOf(samples) {
  const names = new Set(
    samples.flatMap(({ scores, shadow }) => [...Object.keys(scores), ...Object.keys(shadow ?? {})]),
  );
  return [...names].filter((name) => ![...names].some((other) => name.startsWith(`${other}.`)));
}

export const scoreOf = (sample, name) => sample.scores[name] ?? sample.shadow?.[name] ?? null;

/** For each pair of scorers its correlation over these samples and the samples that it judges most differently:
 * { a, b, correlation, samples: [{ sample, gap }] }; gap is the difference of the places, 0 … 1. */
export function disagreements(samples, most = 6) {
  const names = scorersOf(samples);
  return names.flatMap((a, at) =>
    names.slice(at + 1).flatMap((b) => {
      const both = samples.filter((sample) => scoreOf(sample, a) !== null && scoreOf(sample, b) !== null);
      if (both.length < 2) return [];
      const [x, y] = [a, b].map((name) => both.map((sample) => scoreOf(sample, name)));
      const [places, others] = [ranks(x), ranks(y)];
      const gaps = both.map((sample, index) => ({
        sample,
        gap: Math.abs(places[index] - others[index]) / (both.length - 1),
      }));
      return [
        { a, b, correlation: spearman(x, y), samples: gaps.sort((one, two) => two.gap - one.gap).slice(0, most) },
      ];
    }),
  );
}
