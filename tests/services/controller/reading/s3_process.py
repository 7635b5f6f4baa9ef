"""`python -m tests.services.controller.reading.s3_process FOLDER`, where s3fs and moto are installed: reads prompts
from an S3 server of moto's, with and without credentials, and prints as JSON what each reader told."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import boto3  # type: ignore[import-not-found, unused-ignore]
import pyarrow as pa
from moto.server import ThreadedMotoServer  # type: ignore[import-not-found, unused-ignore]
from pyarrow import parquet

from flowfleet.prompts.columns import Columns
from flowfleet.prompts.stores import read_prompts
from services.controller.prompts.sources import Sources, Unread
from services.controller.reading.places import Places

CSV = b"prompt,word\nthe word CAT,cat\nthe word DOG,dog\n"
READER = "FLOWFLEET_READER_"
KEYS = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "secret"}


def main(folder: Path) -> dict[str, object]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    _fill(url)
    os.environ.update({READER + "AWS_ENDPOINT_URL": url, READER + "AWS_MAX_ATTEMPTS": "1"})
    without = _told(folder, ["signs.csv"], ["127.0.0.0/8"])
    public = _told(folder, ["signs.csv"], ["127.0.0.0/8"], FSSPEC_S3_ANON="true")
    inside = _told(folder, ["signs.csv"], [], **KEYS)
    names = ["signs.csv", "table.parquet", "empty.txt", "gone.csv"]
    found = _told(folder, names, ["127.0.0.0/8"], **KEYS)
    os.environ.update({"AWS_ENDPOINT_URL": url, **KEYS})
    own = [prompt.text for prompt in read_prompts("s3://prompts/a/signs.csv", Columns())]
    server.stop()
    return {"without": without, "public": public, "inside": inside, "found": found, "own": own}


def _fill(url: str) -> None:
    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
    )
    client.create_bucket(Bucket="prompts")
    table = io.BytesIO()
    parquet.write_table(pa.table({"prompt": ["x", "y"], "n": [1, 2]}), table)
    for name, data in (("signs.csv", CSV), ("table.parquet", table.getvalue()), ("empty.txt", b"")):
        client.put_object(Bucket="prompts", Key=f"a/{name}", Body=data, ACL="public-read")


def _told(folder: Path, names: list[str], networks: list[str], **environment: str) -> list[object]:
    """Reads each object: gives its prompts with their metadata, or the error."""
    variables = {READER + name: value for name, value in environment.items()}
    os.environ.update(variables)
    sources = Sources(Places.of([folder], ["s3://prompts"], folder / "state"), networks)
    told: list[object] = []
    for name in names:
        try:
            told.append([[prompt.text, dict(prompt.metadata)] for prompt in sources.prompts(f"s3://prompts/a/{name}")])
        except ValueError as error:
            told.append(f"{'later' if isinstance(error, Unread) else 'never'}: {error}")
    sources.close()
    for name in variables:
        del os.environ[name]
    return told


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
