"""Sounds: those of prompts and for scorers as one channel, by default of 16,000 samples a second; those of samples as
they were made. Files may come from strangers."""

import io
import itertools
import wave
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flowfleet.limits import MAX_MEDIA_BYTES
from flowfleet.media.files import VIDEO_TYPES, MediaError

SOUND_RATE: Final = 16_000
"""Samples per second after decoding."""
MAX_SECONDS: Final = 600.0
SOUND_TYPES: Final[Mapping[str, str]] = {
    "audio/wav": "wav",
    "audio/mpeg": "mp3",
    "audio/flac": "flac",
    "audio/ogg": "ogg",
}
"""Media types that are read, and the demuxer of each: the content is never guessed."""
SOUND_CODECS: Final = frozenset({"aac", "mp3", "mp3float", "flac", "vorbis", "libvorbis", "opus", "libopus"})
"""Codecs that are decoded, besides PCM."""


@dataclass(frozen=True)
class Sound:
    """A sound that was made."""

    samples: NDArray[np.float32]
    """(channels, samples) from -1 to 1; one or two channels."""
    rate: int
    """Samples per second."""

    def pcm(self) -> NDArray[np.int16]:
        """(samples, channels)"""
        return (self.samples.T.clip(-1, 1) * 32767).round().astype("<i2")


@dataclass(frozen=True)
class OpenedSound:
    """A file of sound, or a film that is only heard; nothing of it is read yet."""

    data: bytes
    media_type: str
    num_pixels = 0


def encode_sound(sound: Sound) -> tuple[bytes, str]:
    """A WAV file of 16 bits, and its media type."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(len(sound.samples))
        file.setsampwidth(2)
        file.setframerate(sound.rate)
        file.writeframes(sound.pcm().tobytes())
    return out.getvalue(), "audio/wav"


def decode_sound(
    data: bytes, media_type: str, max_seconds: float = MAX_SECONDS, rate: int = SOUND_RATE
) -> NDArray[np.float32]:
    """(samples,) from -1 to 1, of a sound or of a film that has one. Raises MediaError for another type, a broken file
    and one over the limits; its reason is "silent" for a film without sound."""
    form = "mp4" if media_type in VIDEO_TYPES else SOUND_TYPES.get(media_type)
    if form is None:
        raise MediaError("media_type", f"media_type {media_type!r} is not read here: send {', '.join(SOUND_TYPES)}")
    if len(data) > MAX_MEDIA_BYTES:
        raise MediaError("too_large", f"the file has {len(data)} bytes: send at most {MAX_MEDIA_BYTES}")
    parts, count = [], 0
    try:
        for part in _parts(data, form, rate):
            parts.append(part)
            count += len(part)
            if count > max_seconds * rate:
                raise MediaError("too_large", f"the sound is longer than {max_seconds:g} s: send a shorter one")
    except (MediaError, ImportError):  # without PyAV no file is to blame
        raise
    except Exception as error:  # PyAV documents no closed set
        raise _broken(data, media_type, type(error).__name__) from error
    if not count and form == "mp4":
        raise MediaError("silent", "the film has no sound: this reward is for models that make films with sound")
    if not count:
        raise _broken(data, media_type, "there is no sound in it")
    return np.concatenate(parts)


def _parts(data: bytes, form: str, rate: int) -> Iterator[NDArray[np.float32]]:
    import av  # takes a third of a second

    resampler = av.AudioResampler(format="fltp", rate=rate)
    with av.open(io.BytesIO(data), "r", format=form, metadata_errors="replace") as container:
        opened: Any = container
        if not opened.streams.audio:
            return
        stream = opened.streams.audio[0]
        if not (stream.codec_context.name.startswith("pcm_") or stream.codec_context.name in SOUND_CODECS):
            raise MediaError("undecodable", f"codec {stream.codec_context.name} of a sound is not read")
        num_packets = 0
        for frame in itertools.chain(opened.decode(stream), [None]):  # None: what is left
            num_packets += frame is not None
            for part in resampler.resample(frame):
                yield part.to_ndarray().mean(axis=0, dtype=np.float32)  # of channels, which never exceeds the loudest
        if num_packets < stream.frames:  # of a film; other files do not say
            raise ValueError(f"{num_packets} of {stream.frames} parts could be decoded")


def _broken(data: bytes, media_type: str, why: str) -> MediaError:
    return MediaError("undecodable", f"the {len(data)} bytes of media are not a whole {media_type}: {why}")
