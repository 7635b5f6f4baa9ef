// Figures and times as words. Pure.

/** Four significant digits; a dash where there is no figure. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const digits = Math.max(0, Math.min(6, 3 - Math.floor(Math.log10(size))));
  return String(Number(value.toFixed(digits)));
}

const UNITS = [
  ["d", 86400],
  ["h", 3600],
  ["min", 60],
];

/** "2 h 5 min", "41 s", "0.4 s". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${number(Number(seconds.toFixed(1)))} s`;
  let rest = Math.round(seconds);
  const words = [];
  for (const [unit, size] of UNITS) {
    if (rest >= size) words.push(`${Math.floor(rest / size)} ${unit}`);
    rest %= size;
  }
  if (seconds < 600 && rest) words.push(`${rest} s`);
  return words.slice(0, 2).join(" ");
}

/** "3 min ago", from an ISO time. */
export function ago(iso, now = Date.now()) {
  if (!iso) return "–";
  const seconds = (now - Date.parse(iso)) / 1000;
  return seconds < 60 ? "just now" : `${duration(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

export const moment = (iso) => (iso ? new Date(iso).toLocaleString() : "–");
export const short = (id) => id.slice(0, 13);
export const bytes = (size) => (size >= 2 ** 30 ? `${number(size / 2 ** 30)} GiB` : `${number(size / 2 ** 20)} MiB`);
export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

/** "0.42 (rollout 0.31, trainer 0.11)"; null where a job has used none. */
export function hoursWords(hours) {
  const parts = Object.entries(hours ?? {});
  if (!parts.length) return null;
  const rounded = (value) => number(Number(value.toPrecision(3)));
  const sum = parts.reduce((total, [, value]) => total + value, 0);
  return `${rounded(sum)} (${parts.map(([name, value]) => `${name} ${rounded(value)}`).join(", ")})`;
}

const PHASES = {
  rollout: "sampling",
  score: "scoring",
  advantage: "computing advantages",
  train: "training",
  publish: "publishing weights",
  checkpoint: "saving",
  validate: "validating",
};

export const phaseName = (phase) => PHASES[phase] ?? phase;

/** "sampling: 213 of 512 samples, 180 scored". */
export function phaseWords(progress) {
  if (!progress.phase) return "";
  const { samples = 0, samples_sampled: sampled = 0, samples_scored: scored = 0 } = progress;
  const isCounted = samples && (progress.phase === "rollout" || progress.phase === "score");
  const counts = isCounted ? `: ${sampled} of ${samples} samples, ${scored} scored` : "";
  return phaseName(progress.phase) + counts;
}
