import assert from "node:assert/strict";
import { test } from "node:test";

import { Slots } from "../src/slots.ts";

test("so many run at a time, in order, and a failure frees its slot", async () => {
  const slots = new Slots(2);
  const started: number[] = [];
  let running = 0;
  let most = 0;
  const task = async (index: number) => {
    started.push(index);
    most = Math.max(most, ++running);
    await new Promise(setImmediate);
    running -= 1;
    if (index % 3 === 0) throw new Error(`${index}`);
    return index;
  };
  const ends = await Promise.allSettled([...Array(9).keys()].map((index) => slots.use(() => task(index))));
  assert.deepEqual(started, [...Array(9).keys()]);
  assert.equal(most, 2);
  assert.equal(ends.filter((end) => end.status === "rejected").length, 3);
});
