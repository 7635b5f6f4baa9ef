/**
 * RewardService over the colour reward: checks a request as a whole, scores its pictures side by side, and answers
 * with one outcome a sample. A caller that is gone is worked for no longer.
 */
import { availableParallelism } from "node:os";

import { type handleUnaryCall, type ServerUnaryCall, status, type UntypedServiceImplementation } from "@grpc/grpc-js";

import packageJson from "../package.json" with { type: "json" };
import * as colour from "./colour.ts";
import { CONTRACT, type DescribeResponse, type RewardSample, type RewardScore } from "./contract.ts";
import type { ScoreRequest, ScoreResponse } from "./contract.ts";
import { CallError, invalid, PictureError } from "./errors.ts";
import { decode } from "./pictures.ts";
import { Slots } from "./slots.ts";

export const MAX_BATCH = 64;
const VERSION = packageJson.version;

/** The methods; with a `token`, each call must carry it as "authorization: Bearer …". */
export function rewardService(token = ""): UntypedServiceImplementation {
  const slots = new Slots(availableParallelism());

  async function score(request: ScoreRequest, signal: AbortSignal): Promise<ScoreResponse> {
    checkIds(request.samples.map((sample) => sample.sampleId));
    const params = colour.readParams(request.params);
    const scoreOne = async (sample: RewardSample): Promise<RewardScore> => {
      signal.throwIfAborted();
      return outcome(sample, params);
    };
    const scores = await Promise.all(request.samples.map((sample) => slots.use(() => scoreOne(sample))));
    return { scores, version: VERSION };
  }

  return { Describe: unary(token, async () => describe()), Score: unary(token, score) };
}

function describe(): DescribeResponse {
  return {
    name: colour.NAME,
    version: VERSION,
    modalities: ["MODALITY_IMAGE"],
    scoreMin: colour.RANGE[0],
    scoreMax: colour.RANGE[1],
    maxBatchSize: MAX_BATCH,
    needsGroup: false,
    components: colour.COMPONENTS,
    contract: CONTRACT,
  };
}

async function outcome({ sampleId, media, mediaType }: RewardSample, params: colour.Params): Promise<RewardScore> {
  try {
    return { sampleId, mediaSize: media.length, ...colour.score(await decode(media, mediaType), params) };
  } catch (error) {
    if (error instanceof PictureError) return { sampleId, error: error.message };
    throw error;
  }
}

/** Throws INVALID_ARGUMENT for samples that cannot be answered one by one. */
function checkIds(ids: readonly string[]): void {
  if (ids.length === 0) throw invalid("samples is empty: send at least one");
  if (ids.length > MAX_BATCH) {
    throw invalid(`${ids.length} samples in one call, the limit is ${MAX_BATCH} (Describe: max_batch_size): split it`);
  }
  const unnamed = ids.indexOf("");
  if (unnamed >= 0) throw invalid(`samples[${unnamed}].sample_id is empty: scores are matched by it`);
  const twice = ids.find((id, at) => ids.indexOf(id) < at);
  if (twice !== undefined) throw invalid(`sample_id ${JSON.stringify(twice)} occurs twice: scores are matched by it`);
}

/** An async function as a gRPC method: its signal ends with the caller, its errors become canonical codes. */
function unary<Request, Response>(
  token: string,
  answer: (request: Request, signal: AbortSignal) => Promise<Response>,
): handleUnaryCall<Request, Response> {
  return (call, callback) => {
    const gone = new AbortController();
    call.on("cancelled", () => gone.abort());
    authorize(call, token)
      .then(() => answer(call.request, gone.signal))
      .then((response) => callback(null, response))
      .catch((error: unknown) => {
        if (gone.signal.aborted) return; // the caller is gone
        if (error instanceof CallError) callback({ code: error.code, details: error.message });
        else {
          console.error(error);
          callback({ code: status.INTERNAL, details: "the service failed; its log says how" });
        }
      });
  };
}

async function authorize<Request, Response>(call: ServerUnaryCall<Request, Response>, token: string): Promise<void> {
  const [given] = call.metadata.get("authorization");
  if (token && given !== `Bearer ${token}`) {
    throw new CallError(status.UNAUTHENTICATED, "send the fleet's token: set FLOWFLEET_RPC_TOKEN on both sides");
  }
}
