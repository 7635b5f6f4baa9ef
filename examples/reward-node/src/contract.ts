/**
 * The messages of reward.proto as TypeScript sees them. The file itself is read when the service starts, so there is
 * no generated code and no copy of the contract to keep in step.
 */
import { loadPackageDefinition, type ServiceClientConstructor, type ServiceDefinition } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

/** Of reward.proto; the controller refuses a service that speaks a newer one than it knows. */
export const CONTRACT = 1;
export const SERVICE_NAME = "flowfleet.v1.RewardService";

export interface DescribeResponse {
  name: string;
  version: string;
  modalities: ("MODALITY_IMAGE" | "MODALITY_VIDEO")[];
  scoreMin: number;
  scoreMax: number;
  maxBatchSize: number;
  needsGroup: boolean;
  components: readonly string[];
  contract: number;
}

export interface RewardSample {
  sampleId: string;
  media: Buffer;
  mediaType: string;
  prompt: string;
  metadata: Record<string, string>;
  groupId: string;
}

export interface ScoreRequest {
  samples: RewardSample[];
  params: Record<string, string>;
}

/** Either a finite score with its components, or the reason why there is none. */
export type RewardScore = { sampleId: string } & (
  | { score: number; components: Record<string, number>; mediaSize: number }
  | { error: string }
);

export interface ScoreResponse {
  scores: RewardScore[];
  version: string;
}

/** The client's class of RewardService, made from the proto file at `path`. */
export function loadClient(path: string): ServiceClientConstructor {
  const loaded = loadPackageDefinition(loadSync(path, { defaults: true, enums: String, longs: Number }));
  const found = SERVICE_NAME.split(".").reduce<unknown>((at, name) => (at as Record<string, unknown> | undefined)?.[name], loaded);
  if (typeof found !== "function") throw new Error(`${path} defines no ${SERVICE_NAME}`);
  return found as ServiceClientConstructor;
}

/** What a server needs to know of RewardService. */
export const loadService = (path: string): ServiceDefinition => loadClient(path).service;
