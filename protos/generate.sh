#!/bin/sh
# Generates flowfleet/proto from protos/. Usage: protos/generate.sh [PYTHON] [OUTPUT_DIR]; `make protos` calls it.
set -eu
cd "$(dirname "$0")"
python=${1:-python3}
out=${2:-..}
PATH="$(dirname "$(command -v "$python")"):$PATH"
mkdir -p "$out/flowfleet/proto"
"$python" -m grpc_tools.protoc -I . --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
  flowfleet/v1/*.proto externalscaler/*.proto
for file in "$out"/flowfleet/v1/* "$out"/externalscaler/*; do
  sed -e 's/from flowfleet\.v1 import/from flowfleet.proto import/; s/from flowfleet\.v1\./from flowfleet.proto./; s/import flowfleet\.v1\.\([a-z_]*\)/import flowfleet.proto.\1/; s/\bflowfleet\.v1\.\([a-z]*_pb2\)/flowfleet.proto.\1/g; s/from externalscaler import/from flowfleet.proto import/; s/from externalscaler\./from flowfleet.proto./; s/import externalscaler\.\([a-z_]*\)/import flowfleet.proto.\1/; s/\bexternalscaler\.\([a-z]*_pb2\)/flowfleet.proto.\1/g' "$file" > "$out/flowfleet/proto/$(basename "$file")"
done
rm -r "$out/flowfleet/v1" "$out/externalscaler"
