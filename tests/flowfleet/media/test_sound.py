"""Sounds against samples that are known."""

from __future__ import annotations

import io
import wave

import av
import numpy as np
import pytest

from flowfleet.media.files import MediaError, decode_media, encode_media
from flowfleet.media.sound import SOUND_RATE, Sound, decode_sound, encode_sound


def tone(rate: int, channels: int = 1, seconds: float = 0.5, hertz: float = 440.0) -> bytes:
    """A WAV of 16 bits."""
    times = np.arange(int(rate * seconds)) / rate
    samples = (np.sin(2 * np.pi * hertz * times) * 20_000).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(samples, channels).tobytes())
    return buffer.getvalue()


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (16_000, 2), (44_100, 1), (8_000, 2)])
def test_a_tone_keeps_its_length_height_and_loudness(rate: int, channels: int) -> None:
    found = decode_sound(tone(rate, channels), "audio/wav")
    assert found.dtype == np.float32
    assert abs(len(found) - SOUND_RATE / 2) <= 2
    spectrum = np.abs(np.fft.rfft(found))
    assert np.argmax(spectrum) * SOUND_RATE / len(found) == pytest.approx(440, abs=2)
    assert np.abs(found[1000:-1000]).max() == pytest.approx(20_000 / 32_768, abs=0.02)


def test_samples_of_16_khz_are_as_they_were() -> None:
    found = decode_sound(tone(16_000), "audio/wav")
    expected = (np.sin(2 * np.pi * 440 * np.arange(8000) / 16_000) * 20_000).astype("<i2") / 32_768
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_flac_is_read() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray((np.ones((1, 1600)) * 8192).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = 16_000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    np.testing.assert_allclose(decode_sound(buffer.getvalue(), "audio/flac"), np.full(1600, 0.25), atol=1e-6)


@pytest.mark.parametrize(
    ("data", "media_type", "says"),
    [
        (tone(16_000), "audio/x-unknown", "is not read here: send audio/wav"),
        (tone(16_000), "audio/flac", "not a whole audio/flac"),
        (b"no sound", "audio/wav", "not a whole audio/wav"),
        (tone(16_000)[:44], "audio/wav", "not a whole audio/wav"),
        (b"", "audio/ogg", "not a whole audio/ogg"),
    ],
)
def test_what_is_no_sound_is_refused(data: bytes, media_type: str, says: str) -> None:
    with pytest.raises(MediaError, match=says):
        decode_sound(data, media_type)


def test_a_long_sound_is_refused_before_all_of_it_is_decoded() -> None:
    with pytest.raises(MediaError, match=r"longer than 0\.2 s"):
        decode_sound(tone(16_000), "audio/wav", max_seconds=0.2)


def made(channels: int, rate: int = 24_000) -> Sound:
    """A tone of each channel's own pitch, 9 frames of a film long."""
    times = np.arange(int(rate * 9 / 24)) / rate
    tones = [0.5 * np.sin(2 * np.pi * 440 * (channel + 1) * times) for channel in range(channels)]
    return Sound(np.stack(tones).astype(np.float32), rate)


FILM = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), dtype=np.uint8)


@pytest.mark.parametrize("channels", [1, 2])
def test_a_films_sound_is_kept_to_16_bits(channels: int) -> None:
    sound = made(channels)
    film, wave = encode_media(FILM, 24.0, sound), encode_sound(sound)
    assert encode_media(FILM, 24.0, sound) == film
    heard = decode_sound(*film, rate=sound.rate)
    assert np.array_equal(heard, decode_sound(*wave, rate=sound.rate))
    assert np.abs(heard - sound.samples.mean(0)).max() < 2**-14
    assert len(decode_sound(*film)) == pytest.approx(SOUND_RATE * 9 / 24, abs=2)
    silent = decode_media(*encode_media(FILM, 24.0))
    assert np.array_equal(decode_media(*film), silent)  # the picture is the same


def test_a_silent_film_is_refused_in_words() -> None:
    with pytest.raises(MediaError, match="the film has no sound") as refused:
        decode_sound(*encode_media(FILM))
    assert refused.value.reason == "silent"
    film, media_type = encode_media(FILM, 24.0, made(1))
    with pytest.raises(MediaError, match="not a whole video/mp4"):
        decode_sound(film[: len(film) // 2], media_type)
