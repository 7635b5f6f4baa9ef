"""The tiny vision-language model and its server, held against transformers' own generation."""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

from recipes.tiny_vlm.model import TinyVlm, make_tiny_vlm
from recipes.tiny_vlm.server import make_app

RED = Image.new("RGB", (64, 64), "red")


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> TinyVlm:
    return TinyVlm.load(make_tiny_vlm(tmp_path_factory.mktemp("vlm")))


@pytest.fixture(scope="module")
def client(vlm: TinyVlm) -> TestClient:
    return TestClient(make_app(vlm, api_key="secret"), headers={"authorization": "Bearer secret"})


def messages(picture: Image.Image = RED) -> list[dict[str, object]]:
    out = io.BytesIO()
    picture.save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    question = {"type": "text", "text": 'Does this picture show "K7QX", 看板?'}
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, question]}]


def ask(client: TestClient, **more: object) -> dict[str, object]:
    body = {"model": "tiny-vlm", "messages": messages(), "temperature": 0, "max_tokens": 5} | more
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_equal_seeds_make_equal_bytes(tmp_path: Path) -> None:
    first, again, other = (make_tiny_vlm(tmp_path / str(n), seed) for n, seed in enumerate((0, 0, 1)))
    names = sorted(path.name for path in first.iterdir())
    assert "model.safetensors" in names
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in names)
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_greedy_answers_are_those_of_transformers(vlm: TinyVlm, client: TestClient) -> None:
    inputs = vlm.encode(messages(), [RED])
    generated = vlm.model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    choice = ask(client)["choices"][0]  # type: ignore[index]
    assert choice["message"]["content"] == vlm.tokenizer.decode(generated, skip_special_tokens=False)


def test_log_probs_are_those_of_one_forward_over_question_and_answer(vlm: TinyVlm, client: TestClient) -> None:
    answer = ask(client, logprobs=True, top_logprobs=20, max_tokens=3)
    rows = answer["choices"][0]["logprobs"]["content"]  # type: ignore[index]
    tokens = [row["token"] for row in rows]
    prompt = vlm.encode(messages(), [RED])
    ids = torch.cat([prompt["input_ids"][0], torch.tensor([_id(vlm, token) for token in tokens])])[None]
    whole = prompt | {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == vlm.model.config.image_token_id).long(),
    }
    with torch.inference_mode():
        logits = vlm.model(**whole).logits[0, prompt["input_ids"].shape[1] - 1 :]
    expected = torch.log_softmax(logits.double(), -1)
    for row, wanted in zip(rows, expected[: len(rows)], strict=True):
        assert row["logprob"] == pytest.approx(float(wanted[_id(vlm, row["token"])]), abs=1e-4)
        assert [top["logprob"] for top in row["top_logprobs"]] == pytest.approx(wanted.topk(20).values, abs=1e-4)
        assert sum(math.exp(top["logprob"]) for top in row["top_logprobs"]) <= 1.0 + 1e-6
    assert answer["usage"] == {"prompt_tokens": ids.shape[1] - 3, "completion_tokens": 3, "total_tokens": ids.shape[1]}


def _id(vlm: TinyVlm, token: str) -> int:
    (found,) = {n for n in range(len(vlm.tokenizer)) if vlm.tokenizer.decode([n]) == token}
    return found


def test_the_picture_changes_the_answer(vlm: TinyVlm) -> None:
    rows = []
    for color in ("red", "blue"):
        with torch.inference_mode():
            rows.append(vlm.model(**vlm.encode(messages(), [Image.new("RGB", (128, 64), color)])).logits[0, -1])
    assert not torch.allclose(rows[0], rows[1], atol=1e-4)


def test_what_a_server_refuses(client: TestClient) -> None:
    def status(**changes: object) -> int:
        body = {"model": "tiny-vlm", "messages": messages()} | changes
        return client.post("/v1/chat/completions", json=body).status_code

    assert status(model="other") == 404
    assert (
        status(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}])
        == 400
    )
    assert status(top_logprobs=21) == 422
    assert client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
