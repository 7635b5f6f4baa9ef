/** `node src/main.ts --port 7100`: the service as a process, which ends well on SIGTERM and SIGINT. */
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import { serve } from "./server.ts";

const { values } = parseArgs({
  options: {
    host: { type: "string", default: "127.0.0.1" },
    port: { type: "string", default: "7100" },
    proto: {
      type: "string",
      default: fileURLToPath(new URL("../../../protos/flowfleet/v1/reward.proto", import.meta.url)),
    },
  },
});

const port = Number(values.port);
if (!Number.isInteger(port) || port < 0 || port > 65_535) throw new Error(`--port ${values.port}: give 0 to 65535`);

const { address, drain } = await serve({ ...values, port, token: process.env["FLOWFLEET_RPC_TOKEN"]?.trim() ?? "" });
for (const signal of ["SIGTERM", "SIGINT"] as const) {
  process.once(signal, async () => {
    console.log(`${signal}: draining`);
    await drain();
    console.log("stopped");
  });
}
console.log(`serving on ${address}`); // last: whoever reads it may send a signal at once
