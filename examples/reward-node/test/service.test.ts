/** The service as its callers see it: a real server and a real client on a port of this machine. */
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { type Client, credentials, Metadata, type ServiceError, status } from "@grpc/grpc-js";
import sharp from "sharp";

import { type DescribeResponse, loadClient, type RewardScore, type ScoreResponse } from "../src/contract.ts";
import { type RunningServer, serve } from "../src/server.ts";
import { plain, promising, row } from "./pictures.ts";

const PROTO = fileURLToPath(new URL("../../../protos/flowfleet/v1/reward.proto", import.meta.url));
const RewardService = loadClient(PROTO);

let server: RunningServer;
let client: Client;

before(async () => {
  server = await serve({ host: "127.0.0.1", port: 0, proto: PROTO });
  client = connect(server);
});

after(async () => {
  client.close();
  await server.drain();
});

const connect = ({ address }: RunningServer): Client => new RewardService(address, credentials.createInsecure());

/** Calls a method by its name; rejects with gRPC's error. */
function call<Response>(method: string, request: object, to = client, metadata = new Metadata()): Promise<Response> {
  return new Promise((resolve, reject) => {
    const done = (error: ServiceError | null, response: Response) => (error ? reject(error) : resolve(response));
    const options = { deadline: Date.now() + 30_000 };
    (to as unknown as Record<string, Function>)[method]!.call(to, request, metadata, options, done);
  });
}

const sample = (sampleId: string, media: Buffer, mediaType = "image/png") => ({ sampleId, media, mediaType });

async function scores(samples: object[], params: Record<string, string> = {}): Promise<RewardScore[]> {
  return (await call<ScoreResponse>("score", { samples, params })).scores;
}

const scoreOf = (found: RewardScore | undefined): number => (found && "score" in found ? found.score : NaN);
const errorOf = (found: RewardScore | undefined): string => (found && "error" in found ? found.error : "");

test("it says what it is", async () => {
  const described = await call<DescribeResponse>("describe", {});
  assert.equal(described.name, "colour");
  assert.match(described.version, /^\d+\.\d+\.\d+$/);
  assert.deepEqual(described.modalities, ["MODALITY_IMAGE"]);
  assert.deepEqual([described.scoreMin, described.scoreMax, described.maxBatchSize], [0, 1, 64]);
  assert.equal(described.contract, 1);
});

test("PNG and JPEG are scored with components, and ids come back as they were", async () => {
  const { scores: found, version } = await call<ScoreResponse>("score", {
    samples: [sample("ä/猫/🟥", await plain("#ff0000")), sample("jpeg", await plain("#00ffff", "jpeg"), "image/jpeg")],
  });
  assert.deepEqual(found.map(({ sampleId }) => sampleId), ["ä/猫/🟥", "jpeg"]);
  assert.equal(scoreOf(found[0]), 1);
  assert.ok(scoreOf(found[1]) < 0.02);
  const [first] = found;
  assert.ok(first && "components" in first);
  assert.deepEqual(Object.keys(first.components).sort(), ["blue", "brightness", "contrast", "green", "red"]);
  assert.equal(version, (await call<DescribeResponse>("describe", {})).version);
});

test("a request's target counts", async () => {
  const [found] = await scores([sample("a", await plain("#1e90ff"))], { target: "#1E90FF" });
  assert.equal(scoreOf(found), 1);
});

test("every kind of PNG becomes red, green and blue", async () => {
  const found = await scores([
    sample("gray", await row([[255], [255]])),
    sample("transparent", await row([[255, 255, 255, 0], [255, 255, 255, 9]])),
  ], { target: "#ffffff" });
  assert.deepEqual(found.map(scoreOf), [1, 1]);
});

test("a sample that cannot be scored costs the others nothing", async () => {
  const png = await plain("#ff0000");
  const found = await scores([
    sample("good", png),
    sample("video", png, "video/mp4"),
    sample("wrong type", png, "image/jpeg"),
    sample("webp inside", await plain("#ff0000", "webp")),
    sample("svg inside", Buffer.from('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>')),
    sample("noise", Buffer.from("no picture")),
    sample("empty", Buffer.alloc(0)),
    sample("cut", (await plain("#ff0000", "png", 64)).subarray(0, 90)),
  ]);
  assert.equal(scoreOf(found[0]), 1);
  assert.match(errorOf(found[1]), /media_type "video\/mp4" is not read here: send image\/png, image\/jpeg/);
  assert.match(errorOf(found[2]), /the media are image\/png, not image\/jpeg/);
  for (const refused of found.slice(3)) assert.match(errorOf(refused), /bytes of media are not a whole image\/png/);
});

test("a huge picture is refused by its header", async () => {
  const found = await scores([sample("square", promising(60_000, 60_000)), sample("long", promising(20_000, 1))]);
  assert.match(errorOf(found[0]), /60000 x 60000: at most 16777216 pixels/);
  assert.match(errorOf(found[1]), /20000 x 1: .* 16384 a side/);
});

test("a request that cannot be answered is refused as a whole", async () => {
  const media = await plain("#ff0000");
  const many = [...Array(65).keys()].map((index) => sample(`${index}`, media));
  const refused: [request: object, message: RegExp][] = [
    [{ samples: [] }, /samples is empty/],
    [{ samples: [sample("a", media), sample("", media)] }, /samples\[1\]\.sample_id is empty/],
    [{ samples: [sample("a", media), sample("a", media)] }, /sample_id "a" occurs twice/],
    [{ samples: many }, /65 samples in one call, the limit is 64/],
    [{ samples: [sample("a", media)], params: { hue: "1" } }, /params\.hue is unknown/],
    [{ samples: [sample("a", media)], params: { target: "red" } }, /params\.target = "red"/],
  ];
  for (const [request, message] of refused) {
    await assert.rejects(call("score", request), (error: ServiceError) => {
      assert.equal(error.code, status.INVALID_ARGUMENT);
      assert.match(error.details, message);
      return true;
    });
  }
});

test("what a caller that left had waiting is not scored", async () => {
  const media = await plain("#ff0000", "png", 512);
  const samples = [...Array(64).keys()].map((index) => sample(`${index}`, media));
  const own = await serve({ host: "127.0.0.1", port: 0, proto: PROTO });
  const caller = connect(own);
  await call("score", { samples: samples.slice(0, 2) }, caller);
  const start = performance.now();
  await call("score", { samples }, caller);
  const whole = performance.now() - start;
  await assert.rejects(
    new Promise((resolve, reject) => {
      const pending = (caller as unknown as Record<string, Function>)["score"]!({ samples }, (error: unknown) =>
        error ? reject(error) : resolve(undefined),
      );
      setTimeout(() => pending.cancel(), whole / 10);
    }),
    { code: status.CANCELLED },
  );
  const cancelled = performance.now();
  await call("score", { samples: samples.slice(0, 1) }, caller); // queues behind what is left
  assert.ok(performance.now() - cancelled < whole / 2);
  caller.close();
  await own.drain();
});

test("it ends after the calls that it has, and takes no more", async () => {
  const own = await serve({ host: "127.0.0.1", port: 0, proto: PROTO });
  const caller = connect(own);
  const media = await plain("#ff0000", "png", 1024);
  await call("describe", {}, caller); // connected
  const samples = [...Array(8).keys()].map((index) => sample(`${index}`, media));
  const running = call<ScoreResponse>("score", { samples }, caller);
  while (sharp.counters().process === 0) await new Promise(setImmediate); // until it has arrived
  const [{ scores: found }] = await Promise.all([running, own.drain()]);
  assert.deepEqual(found.map(scoreOf), Array(8).fill(1));
  await assert.rejects(call("describe", {}, caller), { code: status.UNAVAILABLE });
  caller.close();
});

test("a token is asked for where one is set, and must be set beyond this machine", async () => {
  const own = await serve({ host: "127.0.0.1", port: 0, proto: PROTO, token: "secret" });
  const caller = connect(own);
  const token = new Metadata();
  token.set("authorization", "Bearer secret");
  await assert.rejects(call("describe", {}, caller), { code: status.UNAUTHENTICATED });
  await call("describe", {}, caller, token);
  caller.close();
  await own.drain();
  await assert.rejects(serve({ host: "0.0.0.0", port: 0, proto: PROTO }), /set FLOWFLEET_RPC_TOKEN/);
});
