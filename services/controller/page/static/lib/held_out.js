// Held-out samples of a job by version and prompt, fetched in blocks of prompts when they are looked at.

import { get, jobPath, withQuery } from "./api.js";

const BLOCK = 50;

/** Path of a held-out sample's picture, known before its record is: pictures need not wait for it. */
export function mediaPath(id, version, group) {
  return jobPath(id, "samples", version, group, 0, "media?purpose=validate");
}

export class HeldOut {
  #blocks = new Map();
  #samples = new Map();

  /** `changed` is called when samples have come. */
  constructor(id, changed) {
    this.id = id;
    this.changed = changed;
  }

  /** The sample, or undefined until it has come. */
  at(version, group) {
    return this.#samples.get(`${version}/${group}`);
  }

  /** Fetches the blocks of these versions that hold prompts `from` … `to`. */
  want(versions, from, to) {
    for (const version of versions) {
      for (let block = Math.floor(from / BLOCK); block * BLOCK < to; block += 1) this.#fetch(version, block);
    }
  }

  #fetch(version, block) {
    const key = `${version}/${block}`;
    if (this.#blocks.has(key)) return;
    const range = { group_from: block * BLOCK, group_to: (block + 1) * BLOCK };
    const query = { purpose: "validate", step: version, order: "oldest", limit: 500, ...range };
    const keep = ({ items }) => {
      for (const sample of items.reverse()) this.#samples.set(`${version}/${sample.group}`, sample);
      this.changed();
    };
    const forget = () => this.#blocks.delete(key);
    this.#blocks.set(key, get(withQuery(jobPath(this.id, "samples"), query)).then(keep, forget));
  }
}
