// Rows of metrics as lines of charts. Pure.

/** Panels of a job page, in order; `lines` name metrics and how they are drawn. `kind` decides which samples a point
 * leads to. Panels whose metrics no row has are left out. */
export function panels(rewards) {
  const line = (metric, label, style = "solid", kind = "train") => ({ metric, label, style, kind });
  return [
    {
      title: "Reward",
      isTotal: true,
      lines: [line("critic/rewards/mean", "training"), line("val/reward", "held out", "points", "validate")],
    },
    ...rewards.map((name) => ({
      title: name,
      note: "raw score",
      by: name,
      lines: [
        line(`critic/rewards/${name}/mean`, "training"),
        line(`val-core/rewards/${name}/mean`, "held out", "points", "validate"),
      ],
    })),
    {
      title: "KL",
      lines: [
        line("actor/ppo_kl", "to the sampling policy"),
        line("actor/kl_loss", "to the reference, as a loss", "dashed"),
        line("critic/reference_kl/mean", "to the reference", "dotted"),
      ],
    },
    {
      title: "Clip fraction",
      lines: [
        line("actor/pg_clipfrac", "clipped rows"),
        line("rollout_corr/beyond_clip", "beyond at the start", "dashed"),
      ],
    },
    {
      title: "Ratio",
      lines: [
        line("actor/ratio_mean", "mean"),
        line("actor/ratio_min", "least", "dotted"),
        line("actor/ratio_max", "greatest", "dotted"),
        line("rollout_corr/ratio_mean", "trainer over rollout", "dashed"),
      ],
    },
    {
      title: "Spread in groups",
      lines: [
        line("critic/rewards/std_mean", "std of the reward"),
        line("critic/rewards/zero_std_ratio", "groups without a spread", "dashed"),
      ],
    },
    { title: "Edge density", lines: [line("val/edge_density", "held out", "points", "validate")] },
    { title: "Color entropy", lines: [line("val/colour_entropy", "held out", "points", "validate")] },
    { title: "Loss", lines: [line("actor/loss", "loss")] },
    { title: "Gradient norm", lines: [line("actor/grad_norm", "before clipping")] },
    { title: "Throughput", note: "images/s per accelerator", lines: [line("perf/throughput", "throughput")] },
    {
      title: "Seconds per step",
      lines: [
        line("timing_s/step", "step"),
        line("timing_s/gen", "sampling", "dashed"),
        line("timing_s/train", "training", "dotted"),
      ],
    },
  ];
}

/** Lines of a panel over several jobs: those of the panel with job, name, color and points: Map(step → value). */
export function linesOf(panel, jobs) {
  return jobs.flatMap((job, at) =>
    panel.lines.flatMap((line, within) => {
      const points = new Map();
      for (const { step, values } of job.rows) {
        const value = values[line.metric];
        if (value !== null && value !== undefined) points.set(step, value);
      }
      if (!points.size) return [];
      return [{ ...line, job: job.id, name: job.name, color: jobs.length > 1 ? at : within, points }];
    }),
  );
}

/** Steps from which other rewards make up the total, given a job's revisions; shadows change nothing. */
export function breaksOf(history = []) {
  return history
    .slice(1)
    .filter((one, at) => JSON.stringify(one.rewards) !== JSON.stringify(history[at].rewards))
    .map((one) => one.from_step);
}

/** uPlot's data: the steps that any line has, then each line's values, null where it has none. */
export function aligned(lines) {
  const steps = [...new Set(lines.flatMap((line) => [...line.points.keys()]))].sort((a, b) => a - b);
  return [steps, ...lines.map((line) => steps.map((step) => line.points.get(step) ?? null))];
}

/** Names of a job's rewards: those of its current set, then others that its rows have. */
export function rewardNames(job, rows) {
  const names = new Set(Object.keys(job.rewards?.active?.rewards ?? {}));
  if (!names.size) Object.keys(job.spec?.rewards ?? {}).forEach((name) => names.add(name));
  for (const { values } of [rows.at(0), rows.at(-1)].filter(Boolean)) {
    for (const metric of Object.keys(values)) {
      const found = /^critic\/rewards\/(.+)\/mean$/.exec(metric);
      if (found) names.add(found[1]);
    }
  }
  return [...names];
}
