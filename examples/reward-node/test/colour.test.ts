/** The arithmetic of the reward, against its formula. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { readParams, score } from "../src/colour.ts";

const pixels = (...colours: [number, number, number][]) => ({
  data: Buffer.from(colours.flat()),
  width: colours.length,
  height: 1,
});
const near = (actual: number, expected: number) => assert.ok(Math.abs(actual - expected) < 1e-12, `${actual}`);

test("the target scores 1, the colour farthest from it 0", () => {
  for (const [target, opposite] of [
    ["#ff0000", [0, 255, 255]],
    ["#000000", [255, 255, 255]],
    ["#4080c0", [255, 0, 0]],
  ] as const) {
    const params = readParams({ target });
    near(score(pixels([...params.target]), params).score, 1);
    near(score(pixels([...opposite]), params).score, 0);
  }
});

test("the score is the mean over the pixels", () => {
  const params = readParams({ target: "#ff0000" });
  const half = score(pixels([255, 0, 0], [0, 255, 255]), params);
  near(half.score, 0.5);
  near(score(pixels([255, 0, 0], [255, 255, 255]), params).score, 1 - Math.sqrt(2 / 3) / 2);
});

test("components are means of the channels, and mean and deviation of the brightness", () => {
  const { components } = score(pixels([255, 0, 0], [255, 255, 255]), readParams({}));
  near(components.red, 1);
  near(components.green, 0.5);
  near(components.blue, 0.5);
  near(components.brightness, (0.2126 + 1) / 2);
  near(components.contrast, (1 - 0.2126) / 2);
});

test("parameters are strict", () => {
  assert.deepEqual(readParams({}).target, [255, 0, 0]);
  assert.deepEqual(readParams({ target: "#0A0b0C" }).target, [10, 11, 12]);
  assert.throws(() => readParams({ colour: "#000000" }), /params\.colour is unknown: this reward takes target/);
  for (const target of ["", "red", "#fff", "#12345g", "#1234567"]) {
    assert.throws(() => readParams({ target }), /params\.target = .*: give a colour/);
  }
});
