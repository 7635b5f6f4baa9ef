/** The life of the service: it binds, says SERVING, and on its end finishes the calls that it has. */
import { Server, ServerCredentials } from "@grpc/grpc-js";
import { HealthImplementation } from "grpc-health-check";

import { loadService, SERVICE_NAME } from "./contract.ts";
import { rewardService } from "./service.ts";

const MAX_MESSAGE_BYTES = 64 * 2 ** 20;
const LOOPBACK = new Set(["127.0.0.1", "localhost", "::1"]);

export interface Options {
  host: string;
  /** 0 takes a free one. */
  port: number;
  /** Path of reward.proto. */
  proto: string;
  /** That callers must send; required beyond loopback. */
  token?: string;
  /** Seconds that running calls get once the service is asked to end. */
  drainS?: number;
}

export interface RunningServer {
  /** host:port */
  address: string;
  /** Refuses new calls, waits for the running ones, and closes. */
  drain(): Promise<void>;
}

/** Starts the service and resolves once it answers. */
export async function serve({ host, port, proto, token = "", drainS = 30 }: Options): Promise<RunningServer> {
  if (!token && !LOOPBACK.has(host)) {
    throw new Error(`--host ${host} can be reached from other machines: set FLOWFLEET_RPC_TOKEN, or bind 127.0.0.1`);
  }
  const server = new Server({ "grpc.max_receive_message_length": MAX_MESSAGE_BYTES });
  server.addService(loadService(proto), rewardService(token));
  const health = new HealthImplementation({ "": "SERVING", [SERVICE_NAME]: "SERVING" });
  health.addToServer(server);

  const name = host.includes(":") ? `[${host}]` : host;
  const bound = await new Promise<number>((resolve, reject) => {
    const told = (error: Error | null, number: number) => (error ? reject(error) : resolve(number));
    server.bindAsync(`${name}:${port}`, ServerCredentials.createInsecure(), told);
  });

  async function drain(): Promise<void> {
    health.setStatus("", "NOT_SERVING");
    health.setStatus(SERVICE_NAME, "NOT_SERVING");
    const late = setTimeout(() => server.forceShutdown(), drainS * 1000);
    await new Promise<void>((resolve) => server.tryShutdown(() => resolve()));
    clearTimeout(late);
  }
  return { address: `${name}:${bound}`, drain };
}
