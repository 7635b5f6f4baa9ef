"""Server and OpenAPI page agree: schemathesis generates valid and broken requests and applies all its checks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from flowfleet.data.blobs import open_blobs
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.store.records import SampleRecord
from services.controller.store.store import Store
from tests.services.controller.test_openapi import SNAPSHOT
from tests.services.controller.test_process import IDLE, controller

Job = Callable[..., dict[str, Any]]
KEY = "a-key-of-some-length"
EXAMPLES = 5
"""Number of examples of each operation, besides the cases that schemathesis derives from the page alone."""

CONFIG = """\
seed = 1
headers = {{ X-API-Key = "{key}" }}
parameters = {{ job_id = "{job_id}" }}

[[operations]]  # beyond a schema: settings of a job that go together, a cursor and its order, NUL in a text
include-name = "POST /v1/jobs"
phases.coverage.enabled = false  # 1,600 cases
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 409, 422]

[[operations]]
include-name = "POST /v1/sweeps"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 409, 422]

[[operations]]
include-name = "PATCH /v1/jobs/{{job_id}}/rewards"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 409, 422]

[[operations]]
include-path-regex = "/votes(/groups/[^/]+/[^/]+)?$"  # about samples that wait
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 404]

[[operations]]
include-path-regex = "/samples$"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400]

[[operations]]
include-path-regex = "^/v1/uploads"  # the body has to be what the path's digest says
checks.positive_data_acceptance.expected-statuses = ["2xx", 400]

[[operations]]
include-path-regex = "/media$"
parameters = {{ job_id = "{job_id}", step = 0, group = 0, index = 0 }}
"""


async def put_sample(redis_url: str, job_id: str) -> None:
    redis = connect(redis_url)
    blob = await open_blobs(redis, "redis").put(keys.blob(job_id, "media", 1), b"\x89PNG picture", ttl_s=600)
    place = {"media_uri": blob.uri, "media_size_bytes": blob.size_bytes, "media_sha256": blob.sha256}
    sample = SampleRecord(step=0, group=0, index=0, prompt="a sign", reward=0.5, scores={"ocr": 0.5})
    await Store(redis).samples.put(job_id, sample.model_copy(update=place))
    await redis.aclose()


def run(address: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(folder / "schemathesis.toml"), "run"]
    command += [f"http://{address}/openapi.json", "--checks", "all", "--phases", "examples,coverage,fuzzing"]
    command += ["--max-examples", str(EXAMPLES), "--workers", "1", "--no-color"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


async def test_the_server_does_what_its_page_says(redis_url: str, tmp_path: Path, job: Job) -> None:
    with controller(IDLE, redis_url, tmp_path, FLOWFLEET_API_KEY=KEY) as (process, address):
        headers = {"X-API-Key": KEY}
        async with httpx.AsyncClient(headers=headers, timeout=30) as browser:
            record = (await browser.post(f"http://{address}/v1/jobs", json=job())).json()
        await put_sample(redis_url, record["id"])
        config = CONFIG.format(key=KEY, job_id=record["id"])
        (tmp_path / "schemathesis.toml").write_text(config)
        result = run(address, tmp_path)
        assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
        paths = json.loads(SNAPSHOT.read_text(encoding="utf-8"))["paths"]
        operations = sum(len(path) for path in paths.values())
        assert f"Tested: {operations}\n" in result.stdout
        assert process.poll() is None
