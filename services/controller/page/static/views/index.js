// The views by the first word of the address; those with a title are in the navigation.

import { Fleet } from "./fleet.js";
import { Job } from "./job.js";
import { Jobs } from "./jobs.js";
import { Rewards } from "./rewards.js";
import { Sweep } from "./sweep.js";
import { Vote } from "./vote.js";

export const VIEWS = [
  { section: "jobs", title: "Jobs", View: Jobs },
  { section: "rewards", title: "Rewards", View: Rewards },
  { section: "fleet", title: "Fleet", View: Fleet },
  { section: "vote", View: Vote },
];

/** The view of a route; what is unknown shows the jobs. */
export function viewOf({ parts }) {
  if (parts[0] === "jobs" && parts[1]) return { section: "jobs", View: Job };
  if (parts[0] === "sweeps" && parts[1]) return { section: "jobs", View: Sweep };
  return VIEWS.find(({ section }) => section === parts[0]) ?? VIEWS[0];
}
