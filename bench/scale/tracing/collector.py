"""A collector that takes traces by OTLP over gRPC and drops them: what they cost their sender is measured.

python -m bench.scale.tracing.collector PORT_FILE
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc

from flowfleet.process import service

EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


async def serve(port_file: Path) -> None:
    async def export(_request: bytes, _context: object) -> bytes:
        return b""  # an empty ExportTraceServiceResponse

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    service.write_port_file(port_file, f"127.0.0.1:{port}")
    stop = asyncio.Event()
    service.stop_on_signals(stop)
    print("ready", flush=True)
    await stop.wait()
    await server.stop(None)


def main() -> None:
    service.end_with_parent()
    asyncio.run(serve(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
