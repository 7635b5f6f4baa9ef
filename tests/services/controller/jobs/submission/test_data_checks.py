"""What a model and its data must agree on, asked at submit through the API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image

from flowfleet.conformance.media import huge_picture
from flowfleet.job.spec import parse_job
from flowfleet.media.files import MediaLimits
from services.controller.jobs.submission.data_checks import MAX_LINES
from tests.services.controller.conftest import Api

Job = Callable[..., dict[str, Any]]


def model(path: Path, pipeline: str) -> dict[str, Any]:
    path.mkdir(exist_ok=True)
    (path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    return {"path": str(path)}


def lines(path: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"train": str(path)}


def pair(chosen: str = "1.png", rejected: str = "2.png", **more: Any) -> dict[str, Any]:
    return {"prompt": "a", "chosen": chosen, "rejected": rejected, **more}


def prompts_of(folder: Path) -> dict[str, str]:
    """Data of a job that validates."""
    (folder / "prompts.txt").write_text("a cat\na dog\n")
    return {name: str(folder / "prompts.txt") for name in ("train", "validation")}


def picture(path: Path, width: int, height: int, orientation: int | None = None) -> str:
    """Its file name."""
    exif = Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    Image.new("RGB", (width, height)).save(path, exif=exif)
    return path.name


async def refusals(api: Api, job: dict[str, Any]) -> list[tuple[str, str]]:
    """(setting, detail) of each error; none when the job is taken."""
    response = await api.client.post("/v1/jobs", json=job)
    if response.status_code == 202:
        return []
    assert response.status_code == 422, response.text
    return [(error["setting"], error["detail"]) for error in response.json()["errors"]]


async def test_a_pipeline_that_is_not_supported(api: Api, job: Job, tmp_path: Path) -> None:
    [(setting, detail)] = await refusals(api, job(model=model(tmp_path / "m", "CogView4Pipeline")))
    assert setting == "model.path"
    assert "is a CogView4Pipeline, which is not supported: use one of" in detail
    assert "QwenImagePipeline" in detail
    (tmp_path / "m" / "model_index.json").write_text("[]")
    [(setting, detail)] = await refusals(api, job(model={"path": str(tmp_path / "m")}))
    assert setting == "model.path"
    assert "does not name a pipeline class" in detail


@pytest.mark.parametrize("num_frames", [1, 9])
async def test_a_video_model_takes_one_frame_or_more(api: Api, job: Job, tmp_path: Path, num_frames: int) -> None:
    rollout = {"num_frames": num_frames}
    assert await refusals(api, job(model=model(tmp_path / "m", "WanPipeline"), rollout=rollout)) == []


@pytest.mark.parametrize("num_frames", [2, 4, 7, 80])
async def test_frames_of_a_video_are_those_of_whole_latent_frames(
    api: Api, job: Job, tmp_path: Path, num_frames: int
) -> None:
    wan = model(tmp_path / "m", "WanPipeline")
    [(setting, detail)] = await refusals(api, job(model=wan, rollout={"num_frames": num_frames}))
    assert setting == "rollout.num_frames"
    below, above = (num_frames - 1) // 4 * 4 + 1, -(-(num_frames - 1) // 4) * 4 + 1
    assert f"set it to {below} or {above}" in detail


async def test_the_checkpoints_vae_says_which_sizes_are_drawn(api: Api, job: Job, tmp_path: Path) -> None:
    wan = model(tmp_path / "m", "WanPipeline")
    rollout = {"num_frames": 5, "height": 48, "width": 64}
    (tmp_path / "m" / "vae").mkdir()
    config = tmp_path / "m" / "vae" / "config.json"
    for content in ('{"scale_factor_spatial": 8}', "{}", "[]", "no JSON"):
        config.write_text(content)
        assert await refusals(api, job(model=wan, rollout=rollout)) == []
    config.write_text('{"scale_factor_spatial": 16}')
    [(setting, detail)] = await refusals(api, job(model=wan, rollout=rollout))
    assert setting == "rollout.height"
    assert "draws multiples of 32 pixels" in detail
    held_out = {"rollout": {**rollout, "height": 64}, "data": prompts_of(tmp_path)}
    [(setting, detail)] = await refusals(api, job(model=wan, **held_out, schedule={"validation_width": 80}))
    assert setting == "schedule.validation_width"
    assert "draws multiples of 32 pixels" in detail


async def test_what_rewards_would_refuse_is_not_sampled(api: Api, job: Job, tmp_path: Path) -> None:
    wan = model(tmp_path / "m", "WanPipeline")
    limits = MediaLimits()
    most = limits.max_total_pixels // (1024 * 1024)  # 128
    rollout = {"height": 1024, "width": 1024, "num_frames": most - 3}
    assert await refusals(api, job(model=wan, rollout=rollout)) == []
    [(setting, detail)] = await refusals(api, job(model=wan, rollout={**rollout, "num_frames": most + 1}))
    assert setting == "rollout"
    assert f"129 frames of 1024 x 1024: at most {limits.max_frames} frames and {limits.max_total_pixels}" in detail
    [(setting, detail)] = await refusals(api, job(rollout={"height": 4096, "width": 4112}))
    assert (setting, f"at most {limits.max_pixels} pixels" in detail) == ("rollout", True)
    large = {"validation_height": 4096, "validation_width": 4112}
    [(setting, detail)] = await refusals(api, job(data=prompts_of(tmp_path), schedule=large))
    assert (setting, "lower schedule.validation_height" in detail) == ("schedule", True)


def test_as_many_frames_as_a_job_may_ask_for_are_read() -> None:
    asked = {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}}
    parse_job({**asked, "rollout": {"num_frames": MediaLimits().max_frames}})
    with pytest.raises(ValueError, match=r"rollout\.num_frames"):
        parse_job({**asked, "rollout": {"num_frames": MediaLimits().max_frames + 1}})


async def test_embedded_guidance_goes_with_a_distilled_model(api: Api, job: Job, tmp_path: Path) -> None:
    rollout = {"embedded_guidance": 3.5}
    assert await refusals(api, job(model=model(tmp_path / "m", "FluxPipeline"), rollout=rollout)) == []
    [(setting, _)] = await refusals(api, job(model=model(tmp_path / "m", "WanPipeline"), rollout=rollout))
    assert setting == "rollout.embedded_guidance"


async def test_only_models_that_cut_prompts_take_a_length(api: Api, job: Job, tmp_path: Path) -> None:
    async def refused(pipeline: str, tokens: int) -> list[tuple[str, str]]:
        asked = {**model(tmp_path / "m", pipeline), "max_sequence_length": tokens}
        return await refusals(api, job(model=asked))

    assert await refused("StableDiffusion3Pipeline", 128) == []
    [(setting, detail)] = await refused("StableDiffusion3Pipeline", 513)
    assert (setting, "Stable Diffusion 3 takes at most 512 tokens" in detail) == ("model.max_sequence_length", True)
    [(setting, detail)] = await refused("QwenImagePipeline", 128)
    assert (setting, "Qwen-Image, which cuts no prompts" in detail) == ("model.max_sequence_length", True)


async def test_only_models_with_a_plan_share_samples(api: Api, job: Job, tmp_path: Path) -> None:
    trainer = {"world_size": 2, "mesh": {"sequence": 2}}
    assert await refusals(api, job(model=model(tmp_path / "m", "FluxPipeline"), trainer=trainer)) == []
    [(setting, detail)] = await refusals(api, job(model=model(tmp_path / "m", "ZImagePipeline"), trainer=trainer))
    assert (setting, "Z-Image cannot split a sample; set it to 1" in detail) == ("trainer.mesh.sequence", True)


async def test_images_go_with_models_that_take_them(api: Api, job: Job, tmp_path: Path) -> None:
    edit = model(tmp_path / "edit", "QwenImageEditPlusPipeline")
    picture(tmp_path / "1.png", 8, 8)
    with_one = lines(tmp_path / "one.jsonl", {"prompt": "a", "images": ["1.png"]})
    mixed = lines(tmp_path / "mixed.jsonl", {"prompt": "a", "images": ["1.png"]}, {"prompt": "b"})
    assert await refusals(api, job(model=edit, data=with_one, rollout={"condition_pixels": 1024})) == []
    [(setting, detail)] = await refusals(api, job(model=edit, data=mixed))
    assert setting == "data.train"
    assert detail.endswith('mixed.jsonl:2: Qwen-Image-Edit-Plus needs condition images: add "images"')
    [(setting, detail)] = await refusals(api, job(model=edit, data={**with_one, "validation": mixed["train"]}))
    assert (setting, "mixed.jsonl:2" in detail) == ("data.validation", True)
    [(setting, detail)] = await refusals(api, job(data=with_one))
    assert detail.endswith('one.jsonl:1: Qwen-Image takes no images: leave out "images"')


async def test_models_that_paint_with_images_and_without_take_either_for_a_whole_job(
    api: Api, job: Job, tmp_path: Path
) -> None:
    klein = model(tmp_path / "klein", "Flux2KleinPipeline")
    picture(tmp_path / "1.png", 64, 64)
    bare, shown = {"prompt": "a"}, {"prompt": "a", "images": ["1.png"]}
    assert await refusals(api, job(model=klein, data=lines(tmp_path / "bare.jsonl", bare, bare))) == []
    assert await refusals(api, job(model=klein, data=lines(tmp_path / "shown.jsonl", shown, shown))) == []
    [(_, detail)] = await refusals(api, job(model=klein, data=lines(tmp_path / "mixed.jsonl", shown, bare)))
    assert "mixed.jsonl:2: has 0 condition images, but " in detail
    kontext = model(tmp_path / "kontext", "FluxKontextPipeline")
    two = {"prompt": "a", "images": ["1.png"] * 2}
    [(_, detail)] = await refusals(api, job(model=kontext, data=lines(tmp_path / "two.jsonl", two)))
    assert detail.endswith("two.jsonl:1: FLUX.1-Kontext takes at most 1 images a prompt: leave out the others")


async def test_a_film_begins_with_an_image_where_job_and_checkpoint_say_so(api: Api, job: Job, tmp_path: Path) -> None:
    wan, plain = model(tmp_path / "wan", "WanPipeline"), model(tmp_path / "plain", "WanPipeline")
    index = {"_class_name": "WanPipeline", "expand_timesteps": True}
    (tmp_path / "wan" / "model_index.json").write_text(json.dumps(index))
    picture(tmp_path / "1.png", 64, 64)
    bare = lines(tmp_path / "bare.jsonl", {"prompt": "a"})
    shown = lines(tmp_path / "shown.jsonl", {"prompt": "a", "images": ["1.png"]})
    film, begun = {"num_frames": 9}, {"num_frames": 9, "from_image": True}
    assert await refusals(api, job(model=wan, data=shown, rollout=begun)) == []
    assert await refusals(api, job(model=wan, data=bare, rollout=film)) == []
    [(_, detail)] = await refusals(api, job(model=wan, data=shown, rollout=film))
    assert detail.endswith('text alone: leave out "images", or set rollout.from_image = true')
    [(_, detail)] = await refusals(api, job(model=wan, data=bare, rollout=begun))
    assert detail.endswith('Wan needs condition images: add "images"')
    [(setting, detail)] = await refusals(api, job(model=plain, data=shown, rollout=begun))
    assert (setting, "makes videos from text alone" in detail) == ("rollout.from_image", True)
    [(setting, detail)] = await refusals(api, job(rollout={"from_image": True}))
    assert (setting, "no effect on Qwen-Image" in detail) == ("rollout.from_image", True)
    [(setting, detail)] = await refusals(api, job(model=wan, data=shown, rollout={**begun, "condition_pixels": 1024}))
    assert (setting, "brings images to the video's size" in detail) == ("rollout.condition_pixels", True)


async def test_films_with_sound(api: Api, job: Job, tmp_path: Path) -> None:
    ltx, wan = model(tmp_path / "ltx", "LTX2Pipeline"), model(tmp_path / "wan", "WanPipeline")
    picture(tmp_path / "1.png", 64, 64)
    shown = lines(tmp_path / "shown.jsonl", {"prompt": "a", "images": ["1.png"]})
    film = {"num_frames": 9, "sound_share": 0.5}
    assert await refusals(api, job(model=ltx, rollout=film)) == []
    assert await refusals(api, job(model=ltx, data=shown, rollout={**film, "from_image": True})) == []
    [(setting, detail)] = await refusals(api, job(model=wan, rollout=film))
    assert (setting, "whose films are silent" in detail) == ("rollout.sound_share", True)
    [(setting, detail)] = await refusals(api, job(model=ltx, rollout={"num_frames": 13}))
    assert (setting, detail.endswith("set it to 9 or 17")) == ("rollout.num_frames", True)
    pairs = lines(tmp_path / "pairs.jsonl", pair("1.mp4", "2.mp4"))
    found = await refusals(api, job(model=ltx, data=pairs, rollout={"num_frames": 9}, algorithm={"name": "dpo"}))
    assert ("algorithm.name", True) in [
        (setting, "films of a data set are read without" in why) for setting, why in found
    ]


async def test_a_distilled_checkpoint_that_ignores_guidance_refuses_it(api: Api, job: Job, tmp_path: Path) -> None:
    klein = model(tmp_path / "klein", "Flux2KleinPipeline")
    rollout = {"guidance_scale": 4.0}
    assert await refusals(api, job(model=klein, rollout=rollout)) == []
    index = {"_class_name": "Flux2KleinPipeline", "is_distilled": True}
    (tmp_path / "klein" / "model_index.json").write_text(json.dumps(index))
    [(setting, detail)] = await refusals(api, job(model=klein, rollout=rollout))
    assert (setting, "ignores guidance; set it to 1" in detail) == ("rollout.guidance_scale", True)


@pytest.fixture
def edit(job: Job, tmp_path: Path) -> Job:
    """A job that edits: each set of data is given as the images of its lines."""

    def make(train: list[list[str]], validation: list[list[str]] | None = None) -> dict[str, Any]:
        sets = {"train": train} | ({} if validation is None else {"validation": validation})
        data = {
            name: lines(tmp_path / f"{name}.jsonl", *({"prompt": "a", "images": row} for row in rows))["train"]
            for name, rows in sets.items()
        }
        return job(model=model(tmp_path / "edit", "QwenImageEditPlusPipeline"), data=data)

    return make


async def test_condition_images_of_one_shape_are_taken_whatever_their_size(api: Api, edit: Job, tmp_path: Path) -> None:
    wide = [picture(tmp_path / "1.png", 30, 20), picture(tmp_path / "2.jpg", 600, 400)]
    turned = [picture(tmp_path / f"turned{o}.{kind}", 40, 60, o) for o, kind in ((6, "jpg"), (8, "png"), (5, "webp"))]
    upright = picture(tmp_path / "3.webp", 15, 10, 3)
    square = picture(tmp_path / "4.png", 7, 7)
    rows = [[image, square] for image in (*wide, *turned, upright, "s3://bucket/any.png")]
    assert await refusals(api, edit(rows, rows[:1])) == []


async def test_condition_images_of_another_shape_are_refused(api: Api, edit: Job, tmp_path: Path) -> None:
    wide, square = picture(tmp_path / "wide.png", 30, 20), picture(tmp_path / "square.png", 16, 16)
    tall = picture(tmp_path / "tall.jpg", 30, 20, 6)
    [first, second] = await refusals(api, edit([[wide], [wide], [square], [tall]]))
    assert first[0] == "data.train"
    for words in ("train.jsonl:3: ", "square.png is 16 x 16 (1:1)", "train.jsonl:1 is 30 x 20 (3:2)", "crop or pad"):
        assert words in first[1]
    assert "train.jsonl:4: " in second[1]
    assert "tall.jpg is 20 x 30 (2:3)" in second[1]
    [(_, detail)] = await refusals(api, edit([[wide, square], [square, square]]))
    assert "image 1 of " in detail
    [(setting, detail)] = await refusals(api, edit([[wide]], [[wide], [square]]))
    assert setting == "data.validation"
    assert "validation.jsonl:2: " in detail
    assert "train.jsonl:1 is 30 x 20" in detail


async def test_another_number_of_condition_images_is_refused(api: Api, edit: Job, tmp_path: Path) -> None:
    square = picture(tmp_path / "square.png", 16, 16)
    [(setting, detail)] = await refusals(api, edit([[square], [square, square]]))
    assert setting == "data.train"
    assert "train.jsonl:2: has 2 condition images, but " in detail
    assert "train.jsonl:1 has 1: give every line" in detail


async def test_a_condition_image_without_a_header_is_refused(api: Api, edit: Job, tmp_path: Path) -> None:
    good = picture(tmp_path / "good.png", 16, 16)
    (tmp_path / "bad.png").write_bytes(b"text")
    for rows, line in (([[good], ["bad.png"]], 2), ([["bad.png"], [good]], 1)):
        [(_, detail)] = await refusals(api, edit(rows))
        assert f"train.jsonl:{line}: " in detail
        assert "bad.png is not a readable image/png" in detail


async def test_images_that_are_missing_huge_or_animated(api: Api, edit: Job, tmp_path: Path) -> None:
    good = picture(tmp_path / "good.png", 16, 16)
    (tmp_path / "huge.png").write_bytes(huge_picture()[0])
    still, other = Image.new("RGB", (16, 16)), Image.new("RGB", (16, 16), "red")
    still.save(tmp_path / "moves.webp", save_all=True, append_images=[other])
    still.convert("CMYK").save(tmp_path / "cmyk.jpg")
    Image.new("I;16", (16, 16)).save(tmp_path / "wide.png")
    assert await refusals(api, edit([[good], ["moves.webp"], ["cmyk.jpg"], ["wide.png"]])) == []  # of films the first
    [(setting, detail)] = await refusals(api, edit([[good], ["absent.png"]]))
    assert (setting, "train.jsonl:2: there is no file " in detail) == ("data.train", True)
    [(setting, detail)] = await refusals(api, edit([[good], ["huge.png"]]))
    assert setting == "data.train"
    assert "train.jsonl:2: the column 'images' names " in detail
    assert detail.endswith(
        "huge.png, a picture of 30000 x 30000: at most 16777216 pixels and 16384 a side are read; give a smaller one"
    )


async def test_sizes_of_lines(api: Api, job: Job, tmp_path: Path) -> None:
    """They are multiples of the checkpoint's pixels, and no larger than the job's; only then is the column one."""
    settings = model(tmp_path / "model", "QwenImagePipeline")
    (tmp_path / "model" / "vae").mkdir()
    (tmp_path / "model" / "vae" / "config.json").write_text(json.dumps({"dim_mult": [1, 2, 4, 4]}))

    async def problems(*cells: Any, **changes: Any) -> list[str]:
        data = lines(tmp_path / "sized.jsonl", *({"prompt": "a", "shape": cell} for cell in cells))
        data |= {"size_column": "shape"} | changes
        found = await refusals(api, job(model=settings, data=data, rollout={"height": 64, "width": 64}))
        return [detail.partition("sized.jsonl:")[2] for _, detail in found if "sized.jsonl" in detail]

    where = "the column 'shape' holds"
    assert await problems("64x32", " 32 × 64 ", None, "") == []
    assert await problems("anything", size_column=None) == []
    assert await problems("64x32", "64") == [f"""2: {where} '64': give width and height, as "768x512\""""]
    assert await problems("64x32", "24x32") == [f"2: {where} 24x32, and this checkpoint draws multiples of 16 pixels"]
    most = "give no more pixels than 64x64, or raise rollout.width and rollout.height"
    assert await problems("64x32", "64x80") == [f"2: {where} 64x80: {most}"]


async def test_a_model_that_writes_text_takes_no_column_of_images(api: Api, job: Job, tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    picture(tmp_path / "1.png", 8, 8)
    data = lines(tmp_path / "one.jsonl", {"prompt": "a"}, {"prompt": "a", "images": ["1.png"]})
    text = {"model": {"path": str(tmp_path / "qwen")}, "algorithm": {"name": "grpo"}, "data": data}
    [detail] = [detail for _, detail in await refusals(api, job(**text)) if "one.jsonl" in detail]
    assert detail.endswith('one.jsonl:2: Qwen3 takes no images: leave out "images"')


async def test_good_preferences_are_taken_without_a_reward(api: Api, job: Job, tmp_path: Path) -> None:
    for name in ("1.png", "2.webp", "1.mp4", "2.mp4"):
        (tmp_path / name).write_bytes(b"medium")
    pictures = lines(tmp_path / "p.jsonl", pair("1.png", "2.webp"), pair(str(tmp_path / "1.png"), "s3://bucket/x.jpg"))
    assert await refusals(api, job(algorithm={"name": "dpo"}, data=pictures, rewards={})) == []
    videos = lines(tmp_path / "v.jsonl", pair("1.mp4", "2.mp4"))
    wan = model(tmp_path / "m", "WanPipeline")
    parts = {"algorithm": {"name": "dpo"}, "model": wan, "rollout": {"num_frames": 9}, "rewards": {}}
    assert await refusals(api, job(**parts, data=videos)) == []
    [(_, detail)] = await refusals(
        api, job(algorithm={"name": "dpo"}, data={**pictures, "validation": job()["data"]["train"]}, rewards={})
    )
    assert "name at least one reward service" in detail


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (pair("absent.png"), "pairs.jsonl:2: there is no file "),
        (pair("1.mp4"), "pairs.jsonl:2: "),
        (pair("1.gif"), "pairs.jsonl:2: "),
        ({"prompt": "a"}, "pairs.jsonl:2: expected an object like"),
        (pair(images=["1.png"]), 'pairs.jsonl:2: Qwen-Image takes no images: leave out "images"'),
    ],
)
async def test_a_bad_preference_is_named(api: Api, job: Job, tmp_path: Path, row: dict[str, Any], words: str) -> None:
    for name in ("1.png", "2.png", "1.mp4"):
        (tmp_path / name).write_bytes(b"medium")
    [(setting, detail)] = await refusals(
        api, job(algorithm={"name": "dpo"}, data=lines(tmp_path / "pairs.jsonl", pair(), row))
    )
    assert setting == "data.train"
    assert words in detail


async def test_a_picture_is_no_video(api: Api, job: Job, tmp_path: Path) -> None:
    for name in ("1.png", "2.mp4"):
        (tmp_path / name).write_bytes(b"medium")
    data = lines(tmp_path / "pairs.jsonl", pair("1.png", "2.mp4"))
    wan = model(tmp_path / "m", "WanPipeline")
    for num_frames, words in ((9, "1.png is no video"), (1, "2.mp4 is no picture")):
        parts = {"algorithm": {"name": "dpo"}, "model": wan, "rollout": {"num_frames": num_frames}}
        [(setting, detail)] = await refusals(api, job(**parts, data=data))
        assert setting == "data.train"
        assert words in detail


async def test_many_bad_lines_are_named_up_to_a_limit(api: Api, job: Job, tmp_path: Path) -> None:
    data = lines(tmp_path / "pairs.jsonl", *[pair("absent.png", "gone.png")] * 1000)
    found = await refusals(api, job(algorithm={"name": "dpo"}, data=data))
    assert len(found) == MAX_LINES
    assert "pairs.jsonl:1: " in found[0][1]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("hf://datasets/org/name", "--data-url hf://datasets/org"),
        ("hf://org/name", "write hf://datasets/ORG/NAME"),
        ("s3://other/prompts.csv", "--data-url s3://other"),
        ("s3://bucket/prompts.tsv", "it ends in .tsv, which is no format of prompts: give .txt, .jsonl"),
    ],
)
async def test_remote_places_are_refused_by_their_name_alone(api: Api, job: Job, place: str, words: str) -> None:
    [(setting, detail)] = await refusals(api, job(data={"train": place}))
    assert setting == "data.train"
    assert words in detail
